"""Calls as JSON and nothing else: an object, several, a list of them, in a code fence or not.

Llama 3 writes them so, and models that know no tools do when they are asked to.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

from pelton.text.tools.call_object import call_object
from pelton.text.tools.dialect import Dialect
from pelton.text.tools.layout import Layout
from pelton.text.tools.reader import Reader, Scan, Sink

PYTHON_TAG = "<|python_tag|>"
FENCE = "```"


class GenericJSON(Dialect):
    """All of the answer is calls, from its beginning; any other JSON is text."""

    name = "json"
    markers: ClassVar[tuple[str, ...]] = ()
    layout = Layout("", '{"name": "{name}", "arguments": ', "}", "\n", "")

    def __init__(self, *, is_enforced: bool = False) -> None:
        self._is_enforced = is_enforced

    def enforced(self) -> GenericJSON:
        """As in `Dialect`: without a fence, which is text then."""
        return type(self)(is_enforced=True)

    def parse(self, reader: Reader, sink: Sink, names: Collection[str]) -> Scan[None]:
        """As in `Dialect`."""
        yield from reader.skip_space()
        if (yield from reader.peek()) not in ("{", "[", *(() if self._is_enforced else FENCE[0])):
            reader.put_back()
            return
        is_fenced = yield from reader.literal(FENCE)
        if is_fenced:
            yield from reader.word()
            yield from reader.skip_space()
        if (yield from _calls(reader, sink, names)) and is_fenced:
            yield from reader.skip_space()
            yield from reader.skip_marker(sink, FENCE)
        sink.text(reader.taken())


class Llama3(GenericJSON):
    """The same with `parameters`; behind a tag, calls may follow text."""

    name = "llama3"
    markers = (PYTHON_TAG,)
    layout = Layout("", '{"name": "{name}", "parameters": ', "}", "; ", "")

    def parse(self, reader: Reader, sink: Sink, names: Collection[str]) -> Scan[None]:
        """As in `Dialect`."""
        yield from super().parse(reader, sink, names)
        while not self._is_enforced and (yield from reader.content(sink, [PYTHON_TAG])):
            yield from reader.skip_space()
            yield from _calls(reader, sink, names)
            sink.text(reader.taken())


def _calls(reader: Reader, sink: Sink, names: Collection[str]) -> Scan[bool]:
    """Calls one after the other. Is there any? What is left over of what was taken is not put out."""
    is_list = yield from reader.literal("[")
    yield from reader.skip_space()
    num_calls = 0
    while (yield from reader.peek()) == "{" and (yield from call_object(reader, sink, names, is_marked=False)):
        num_calls += 1
        yield from reader.skip_space()
        if (yield from reader.peek()) in (";", ","):
            yield from reader.take()
            yield from reader.skip_space()
    if num_calls:
        if is_list and (yield from reader.literal("]")):
            reader.taken()
        if not (yield from reader.peek()):
            reader.taken()
    return num_calls > 0
