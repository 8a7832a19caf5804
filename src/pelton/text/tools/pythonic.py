"""[f(a=1, b="x"), g()]: calls as Python writes them, with keyword arguments: Llama 4 and others."""

from __future__ import annotations

import ast
import json
from collections.abc import Collection

from pelton.text.tools.dialect import Dialect
from pelton.text.tools.json_text import MAX_DEPTH
from pelton.text.tools.layout import Layout
from pelton.text.tools.reader import MAX_HELD, NotACall, Reader, Scan, Sink

START, END = "<|python_start|>", "<|python_end|>"
_CLOSING = {"(": ")", "[": "]", "{": "}"}


class Pythonic(Dialect):
    """All of the answer is one list of calls, from its beginning; any other list is text."""

    name = "pythonic"
    markers = (START, END)
    layout = Layout("[", "{name}(", ")", ", ", "]", is_python=True)

    def parse(self, reader: Reader, sink: Sink, names: Collection[str]) -> Scan[None]:
        """As in `Dialect`."""
        yield from reader.skip_space()
        is_marked = yield from reader.literal(START)
        if is_marked or (yield from reader.peek()) == "[":
            has_called = yield from _calls(reader, sink, names)
            if is_marked and has_called:
                yield from reader.skip_marker(sink, END)
        sink.text(reader.taken())


def _calls(reader: Reader, sink: Sink, names: Collection[str]) -> Scan[bool]:
    """A list of calls. Is there one, and nothing wrong with it?"""
    if not (yield from reader.literal("[")):
        return False
    yield from reader.skip_space()
    while (yield from _call(reader, sink, names)):
        yield from reader.skip_space()
        if not (yield from reader.literal(",")):
            yield from reader.skip_marker(sink, "]")
            return True
        yield from reader.skip_space()
    return False


def _call(reader: Reader, sink: Sink, names: Collection[str]) -> Scan[bool]:
    try:
        name = yield from reader.until("([{,]\n\"'", 128)
        if name not in names or (yield from reader.peek()) != "(":
            raise NotACall(f"there is no tool {name[:64]!r}")
    except NotACall:  # a list like any other
        sink.text(reader.taken())
        return False
    yield from reader.take()
    sink.begin(name)
    reader.taken()
    sink.arguments("{")
    try:
        yield from _keywords(reader, sink)
    except NotACall as reason:
        sink.end(is_complete=False)
        sink.broken(reader.taken(), str(reason))
        return False
    reader.taken()
    sink.arguments("}")
    sink.end(is_complete=True)
    return True


def _keywords(reader: Reader, sink: Sink) -> Scan[None]:
    yield from reader.skip_space()
    seen: set[str] = set()
    while not (yield from reader.literal(")")):
        key = (yield from reader.until("=,()\"'\n", 256)).strip()
        if not key or key in seen or not (yield from reader.literal("=")):
            raise NotACall("an argument has no name of its own")
        value = yield from _value(reader)
        sink.arguments((", " if seen else "") + json.dumps(key, ensure_ascii=False) + ": " + value)
        seen.add(key)
        reader.taken()
        if (yield from reader.literal(",")):
            yield from reader.skip_space()


def _value(reader: Reader) -> Scan[str]:
    """A literal up to the comma or parenthesis behind it, as JSON."""
    text: list[str] = []
    open_brackets: list[str] = []
    while (character := (yield from reader.peek())) not in (",", ")") or open_brackets:
        if not character:
            raise NotACall("the answer ends inside of its arguments")
        if len(text) > MAX_HELD or len(open_brackets) > MAX_DEPTH:
            raise NotACall("an argument is too long, or nested too deep")
        text.append((yield from reader.take()))
        if character in "\"'":
            yield from _string(reader, character, text)
        elif character in _CLOSING:
            open_brackets.append(_CLOSING[character])
        elif open_brackets and character == open_brackets[-1]:
            open_brackets.pop()
        elif character in ")]}":
            raise NotACall(f"{character!r} closes nothing")
    return _as_json("".join(text).strip())


def _string(reader: Reader, quote: str, text: list[str]) -> Scan[None]:
    """The rest of a string, its closing quote included."""
    while (character := (yield from reader.take())) != quote:
        if not character or len(text) > MAX_HELD:
            raise NotACall("a string in it is broken")
        text.append(character)
        if character == "\\":
            text.append((yield from reader.take()))
    text.append(quote)


def _as_json(text: str) -> str:
    """A literal of Python or of JSON as JSON."""
    try:
        try:
            value = json.loads(text)
        except ValueError:
            value = ast.literal_eval(text)
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        raise NotACall(f"{text[:64]!r} is no literal") from None
