"""What parsers of a model's text are written with: a reader of characters that waits for more, and a sink of pieces.

A parser is a generator that is sent one character at a time, and "" at the end. However a text is cut into pieces, it
sees the same characters, and so finds the same.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T")
Scan = Generator[None, str, T]
"""A part of a parser that gives a `T`."""

WHITE_SPACE = " \n\t\r"
MAX_HELD = 1 << 16
"""Characters of one string or literal that are held back until it is known what they are."""


class Text(NamedTuple):
    """A piece of the answer, or of what is thought before it."""

    text: str
    is_reasoning: bool = False


class Begin(NamedTuple):
    """A call begins."""

    name: str


class Arguments(NamedTuple):
    """A piece of the JSON text of the call's arguments."""

    text: str


class End(NamedTuple):
    """The call has ended."""


Piece = Text | Begin | Arguments | End


class NotACall(Exception):
    """What was read resembles a call, and is none. The message says why."""


class Reader:
    """The characters of a text, the next of which can be looked at."""

    def __init__(self) -> None:
        self._ahead: list[str] = []
        """What comes next as far as it was looked at, the next character last."""
        self._taken: list[str] = []

    def peek(self) -> Scan[str]:
        """The next character; "" at the end."""
        if not self._ahead:
            self._ahead.append((yield))
        return self._ahead[-1]

    def take(self) -> Scan[str]:
        """The next character, which is then behind."""
        character = yield from self.peek()
        if character:
            self._taken.append(self._ahead.pop())
        return character

    def put_back(self) -> None:
        """Let what was taken since the last call of `taken` come again."""
        self._ahead += reversed(self._taken)
        self._taken = []

    def taken(self) -> str:
        """What was taken since the last call of this."""
        text, self._taken = "".join(self._taken), []
        return text

    def skip_space(self) -> Scan[None]:
        """Take white space."""
        while (character := (yield from self.peek())) and character in WHITE_SPACE:
            yield from self.take()

    def literal(self, text: str) -> Scan[bool]:
        """Take `text`, as far as it is what comes. Is it?"""
        for expected in text:
            if (yield from self.peek()) != expected:
                return False
            yield from self.take()
        return True

    def expect(self, text: str, what: str) -> Scan[None]:
        """Take `text`. Raises `NotACall`."""
        if not (yield from self.literal(text)):
            raise NotACall(f"{what} is missing")

    def skip_marker(self, sink: Sink, marker: str) -> Scan[None]:
        """Leave out a marker that ends something, with what was taken before it. Any other text is put out, unless the
        answer ends inside of it."""
        if not (yield from self.literal(marker)) and (yield from self.peek()):
            sink.text(self.taken())
        self.taken()

    def word(self) -> Scan[None]:
        """Take letters."""
        while (yield from self.peek()).isalpha():
            yield from self.take()

    def until(self, stops: str, limit: int) -> Scan[str]:
        """Take all before one of the characters `stops`. Raises `NotACall` at the end, and over the limit."""
        found: list[str] = []
        while (character := (yield from self.peek())) not in stops or not character:
            if not character or len(found) >= limit:
                raise NotACall("the name is cut" if not character else "the name is too long")
            found.append((yield from self.take()))
        return "".join(found)

    def content(self, sink: Sink, markers: Sequence[str], *, is_reasoning: bool = False) -> Scan[str]:
        """Put out text up to the first of `markers`, which is taken and given; "" at the end."""
        held = ""
        while character := (yield from self.take()):
            held += character
            while held and not any(marker.startswith(held) for marker in markers):
                sink.text(held[0], is_reasoning=is_reasoning)
                held = held[1:]
            self._taken = [held]
            if held in markers:
                return held
        sink.text(held, is_reasoning=is_reasoning)
        self._taken = []
        return ""


class Sink:
    """Collects what a parser finds. White space between thoughts, answer and calls is left out."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.warnings: list[str] = []
        self.num_calls = 0
        self.num_complete = 0
        """Calls whose arguments are a whole JSON object."""
        self.is_thinking = False
        """Is the text inside of thoughts?"""
        self._space = ""
        """White space at the end of the text so far, where it may be left out."""
        self._trims_start = False
        self._trims_end = False
        self._is_reasoning = False

    def trim(self, *, start: bool, end: bool) -> None:
        """From here on, leave white space out at the beginning or at the end of the text."""
        self._trims_start, self._trims_end = start, end

    def text(self, text: str, *, is_reasoning: bool = False) -> None:
        """A piece of the answer or of what is thought."""
        if is_reasoning != self._is_reasoning:
            self._space, self._is_reasoning = "", is_reasoning
        if self._trims_start:
            text = text.lstrip(WHITE_SPACE)
        if self._trims_end:
            text = self._space + text
            kept = text.rstrip(WHITE_SPACE)
            self._space, text = text[len(kept) :], kept
        if text:
            self._trims_start = False
            self._add(Text(text, is_reasoning))

    def begin(self, name: str) -> None:
        """A call begins."""
        self._trims_start = True
        self.num_calls += 1
        self._add(Begin(name))

    def arguments(self, text: str) -> None:
        """A piece of the call's arguments."""
        self._add(Arguments(text))

    def end(self, *, is_complete: bool) -> None:
        """The call has ended."""
        self.num_complete += is_complete
        self._add(End())

    def broken(self, text: str, reason: str) -> None:
        """Text that was to be a call, and is none."""
        self.warnings.append(f"text that looks like a tool call is none: {reason}")
        self.text(text)

    def finish(self) -> None:
        """The text has ended."""
        if self._space and not self.num_calls and not self._is_reasoning:
            self._add(Text(self._space))
        self._space = ""

    def take(self) -> list[Piece]:
        """What was found since the last call of this."""
        pieces, self.pieces = self.pieces, []
        return pieces

    def _add(self, piece: Piece) -> None:
        last = self.pieces[-1] if self.pieces else None
        if isinstance(piece, Text) and isinstance(last, Text) and piece.is_reasoning == last.is_reasoning:
            self.pieces[-1] = Text(last.text + piece.text, piece.is_reasoning)
        elif isinstance(piece, Arguments) and isinstance(last, Arguments):
            self.pieces[-1] = Arguments(last.text + piece.text)
        else:
            self.pieces.append(piece)
