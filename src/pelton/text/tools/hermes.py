"""<tool_call>{"name": "f", "arguments": {...}}</tool_call>: Hermes, Qwen and many others."""

from __future__ import annotations

from collections.abc import Collection

from pelton.text.tools.call_object import call_object
from pelton.text.tools.dialect import Dialect
from pelton.text.tools.reader import Reader, Scan, Sink

BEGIN, END = "<tool_call>", "</tool_call>"


class Hermes(Dialect):
    """Each call stands in a tag of its own, anywhere in the text."""

    name = "hermes"
    markers = (BEGIN, END)

    def parse(self, reader: Reader, sink: Sink, names: Collection[str]) -> Scan[None]:
        """As in `Dialect`."""
        while (yield from reader.content(sink, [BEGIN])):
            yield from reader.skip_space()
            while (yield from call_object(reader, sink, names, needs_arguments=False)):
                yield from reader.skip_space()
                if (yield from reader.peek()) != "{":  # some write several calls into one tag
                    yield from _end(reader, sink)
                    break


def _end(reader: Reader, sink: Sink) -> Scan[None]:
    if not (yield from reader.literal(END)) and (yield from reader.peek()):
        sink.text(reader.taken())
    reader.taken()
