"""<tool_call>{"name": "f", "arguments": {...}}</tool_call>: Hermes, Qwen and many others."""

from __future__ import annotations

from collections.abc import Collection

from pelton.text.tools.call_object import call_object
from pelton.text.tools.dialect import Dialect
from pelton.text.tools.json_calls import GenericJSON
from pelton.text.tools.layout import Layout
from pelton.text.tools.reader import Reader, Scan, Sink

_JSON = GenericJSON()
BEGIN, END = "<tool_call>", "</tool_call>"


class Hermes(Dialect):
    """Each call stands in a tag of its own, anywhere in the text. Models that forget the tags and answer with nothing
    but a call's JSON are understood, too."""

    name = "hermes"
    markers = (BEGIN, END)
    trigger = BEGIN
    layout = Layout("", BEGIN + '\n{"name": "{name}", "arguments": ', "}\n" + END, "\n", "")

    def __init__(self, *, is_enforced: bool = False) -> None:
        self._is_enforced = is_enforced

    def enforced(self) -> Hermes:
        """As in `Dialect`: with tags alone."""
        return Hermes(is_enforced=True)

    def parse(self, reader: Reader, sink: Sink, names: Collection[str]) -> Scan[None]:
        """As in `Dialect`."""
        if not self._is_enforced:
            yield from _JSON.parse(reader, sink, names)
        while (yield from reader.content(sink, [BEGIN])):
            yield from reader.skip_space()
            while (yield from call_object(reader, sink, names, is_marked=True)):
                yield from reader.skip_space()
                if (yield from reader.peek()) != "{":  # some write several calls into one tag
                    yield from reader.skip_marker(sink, END)
                    break
