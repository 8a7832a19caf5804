"""A call written as a JSON object: {"name": "f", "arguments": {...}}, as most dialects have it."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from pelton.text.tools.json_text import JSONText
from pelton.text.tools.reader import MAX_HELD, NotACall, Reader, Scan, Sink

_NAME = ("name", "function")
_ARGUMENTS = ("arguments", "parameters")
_IGNORED = ("id", "type", "tool_call_id")
"""Keys that models add, and whose values say nothing."""


@dataclass
class _Call:
    """What is known of a call under way."""

    name: str | None = None
    early: str | None = None
    """Arguments that came before the name."""
    has_begun: bool = False
    is_complete: bool = False
    """Are all of its arguments out?"""
    seen: set[str] = field(default_factory=set)


def call_object(reader: Reader, sink: Sink, names: Collection[str], *, is_marked: bool) -> Scan[bool]:
    """Read one object, and put out the call that it is. False: it is none, and what was taken of it is put out as
    text; so is what stands behind the arguments of a call that is broken there.

    Nothing is put out before the name and the beginning of the arguments are known. `is_marked`: the text says that it
    is a call. What does not is one only with arguments, and any other JSON is no reason for a warning.
    """
    call = _Call()
    try:
        yield from _members(reader, sink, names, call)
        if not call.has_begun:
            if call.name is None or not is_marked:
                raise NotACall("it has no name" if call.name is None else "it has no arguments")
            _put_out(sink, call, "{}")
    except NotACall as reason:
        if call.has_begun:
            sink.end(is_complete=call.is_complete)
        if is_marked or call.has_begun:
            sink.broken(reader.taken(), str(reason))
        else:
            sink.text(reader.taken())
        return False
    reader.taken()
    sink.end(is_complete=True)
    return True


def named_call(reader: Reader, sink: Sink, names: Collection[str], header: Scan[str]) -> Scan[bool]:
    """Read a call whose name stands before its arguments, which are JSON. `header` reads all up to those. False: it is
    none, as in `call_object`."""
    has_begun = False

    def begin_and_put_out(character: str) -> None:
        nonlocal has_begun
        if not has_begun:
            has_begun = True
            sink.begin(name)
        sink.arguments(character)
        reader.taken()

    try:
        name = yield from header
        if name not in names:
            raise NotACall(f"there is no tool {name[:64]!r}")
        yield from json_object(reader, begin_and_put_out)
    except NotACall as reason:
        if has_begun:
            sink.end(is_complete=False)
        sink.broken(reader.taken(), str(reason))
        return False
    sink.end(is_complete=True)
    return True


def _members(reader: Reader, sink: Sink, names: Collection[str], call: _Call) -> Scan[None]:
    yield from reader.expect("{", "{")
    yield from reader.skip_space()
    if (yield from reader.literal("}")):
        return
    while True:
        key = yield from json_string(reader)
        yield from reader.skip_space()
        yield from reader.expect(":", "a colon")
        yield from reader.skip_space()
        yield from _member(reader, sink, names, call, key)
        yield from reader.skip_space()
        if (yield from reader.literal("}")):
            return
        yield from reader.expect(",", "a comma")
        yield from reader.skip_space()


def _member(reader: Reader, sink: Sink, names: Collection[str], call: _Call, key: str) -> Scan[None]:
    kind = "name" if key in _NAME else "arguments" if key in _ARGUMENTS else key
    if kind in call.seen:
        raise NotACall(f"it has two of {key!r}")
    call.seen.add(kind)
    if kind == "name":
        name = yield from json_string(reader)
        if name not in names:
            raise NotACall(f"there is no tool {name[:64]!r}")
        call.name = name
        if call.early is not None:
            _put_out(sink, call, call.early)
            reader.taken()
    elif kind == "arguments":
        yield from _arguments(reader, sink, call)
    elif key in _IGNORED:
        yield from json_string(reader)
    else:
        raise NotACall(f"a call has no {key[:64]!r}")


def _arguments(reader: Reader, sink: Sink, call: _Call) -> Scan[None]:
    if (yield from reader.peek()) == '"':  # the JSON text as a string
        text = yield from json_string(reader)
        if not is_object(text):
            raise NotACall("its arguments are no JSON object")
        if call.name is None:
            call.early = text
        else:
            _put_out(sink, call, text)
            reader.taken()
        return
    if call.name is None:
        held: list[str] = []
        yield from json_object(reader, held.append)
        call.early = "".join(held)
        return

    def begin_and_put_out(character: str) -> None:
        if not call.has_begun:
            call.has_begun = True
            sink.begin(call.name or "")
        sink.arguments(character)
        reader.taken()

    yield from json_object(reader, begin_and_put_out)
    call.is_complete = True


def _put_out(sink: Sink, call: _Call, arguments: str) -> None:
    call.has_begun = call.is_complete = True
    sink.begin(call.name or "")
    sink.arguments(arguments)


def json_object(reader: Reader, put_out: Callable[[str], None]) -> Scan[None]:
    """Take one JSON object, and hand on each of its characters."""
    if (yield from reader.peek()) != "{":
        raise NotACall("its arguments are no JSON object")
    text = JSONText()
    while not text.is_complete:
        character = yield from reader.peek()
        if not character:
            raise NotACall("the answer ends inside of its arguments")
        if not text.step(character):
            raise NotACall(f"{character!r} cannot stand where it does in its arguments")
        put_out((yield from reader.take()))


def json_string(reader: Reader) -> Scan[str]:
    """Take one JSON string; its value."""
    if (yield from reader.peek()) != '"':
        raise NotACall("a string is missing")
    text = JSONText()
    taken: list[str] = []
    while not text.is_complete:
        character = yield from reader.peek()
        if not character or not text.step(character) or len(taken) > MAX_HELD:
            raise NotACall("a string in it is broken")
        taken.append((yield from reader.take()))
    value: str = json.loads("".join(taken))
    return value


def is_object(text: str) -> bool:
    """Is it the JSON text of an object?"""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
