"""[TOOL_CALLS][{"name": "f", "arguments": {...}}], or [TOOL_CALLS]f[ARGS]{...}: Mistral, old and new."""

from __future__ import annotations

import secrets
import string
from collections.abc import Collection

from pelton.text.tools.call_object import call_object, named_call
from pelton.text.tools.dialect import Dialect
from pelton.text.tools.layout import Layout
from pelton.text.tools.reader import NotACall, Reader, Scan, Sink

BEGIN, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_ALPHABET = string.ascii_letters + string.digits


class Mistral(Dialect):
    """Behind a marker a list of objects."""

    name = "mistral"
    markers = (BEGIN, ARGS, CALL_ID)
    trigger = BEGIN
    layout = Layout(BEGIN + "[", '{"name": "{name}", "arguments": ', "}", ", ", "]")

    def call_id(self) -> str:
        """Nine letters and digits: templates refuse others."""
        return "".join(secrets.choice(_ALPHABET) for _ in range(9))

    def parse(self, reader: Reader, sink: Sink, names: Collection[str]) -> Scan[None]:
        """As in `Dialect`."""
        while (yield from reader.content(sink, [BEGIN])):
            yield from reader.skip_space()
            if (yield from reader.peek()) in ("[", "{"):
                yield from _list(reader, sink, names)
            else:
                yield from named_call(reader, sink, names, _header(reader))


class MistralNamed(Mistral):
    """Behind a marker a name, a second marker, and the arguments."""

    name = "mistral-named"
    layout = Layout("", BEGIN + "{name}" + ARGS, "", "", "")


def _list(reader: Reader, sink: Sink, names: Collection[str]) -> Scan[None]:
    is_list = yield from reader.literal("[")
    yield from reader.skip_space()
    while (yield from call_object(reader, sink, names, is_marked=True)):
        yield from reader.skip_space()
        if not (yield from reader.literal(",")):
            break
        yield from reader.skip_space()
    else:
        return
    if is_list:
        yield from reader.skip_marker(sink, "]")


def _header(reader: Reader) -> Scan[str]:
    name = yield from reader.until("[{", 128)
    if (yield from reader.peek()) == "[":
        yield from reader.take()
        if (yield from reader.peek()) == CALL_ID[1]:
            yield from reader.expect(CALL_ID[1:], CALL_ID)
            yield from reader.until("[", 64)
            yield from reader.take()
        yield from reader.expect(ARGS[1:], ARGS)
    yield from reader.skip_space()
    if not name:
        raise NotACall("it has no name")
    return name.strip()
