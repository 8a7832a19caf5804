"""<tool_call>{"name": "f", "arguments": {...}}</tool_call>: Hermes, Qwen and many others."""

from __future__ import annotations

from collections.abc import Collection

from pelton.text.tools.call_object import call_object
from pelton.text.tools.dialect import Dialect
from pelton.text.tools.layout import Layout
from pelton.text.tools.reader import Reader, Scan, Sink

BEGIN, END = "<tool_call>", "</tool_call>"


class Hermes(Dialect):
    """Each call stands in a tag of its own, anywhere in the text."""

    name = "hermes"
    markers = (BEGIN, END)
    trigger = BEGIN
    layout = Layout("", BEGIN + '\n{"name": "{name}", "arguments": ', "}\n" + END, "\n", "")

    def parse(self, reader: Reader, sink: Sink, names: Collection[str]) -> Scan[None]:
        """As in `Dialect`."""
        while (yield from reader.content(sink, [BEGIN])):
            yield from reader.skip_space()
            while (yield from call_object(reader, sink, names, is_marked=True)):
                yield from reader.skip_space()
                if (yield from reader.peek()) != "{":  # some write several calls into one tag
                    yield from reader.skip_marker(sink, END)
                    break
