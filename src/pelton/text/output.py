"""A model's text -> thoughts, answer and tool calls, as it comes."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from pelton.text.reasoning import Tags, thoughts
from pelton.text.tools.dialect import Dialect
from pelton.text.tools.reader import Piece, Reader, Scan, Sink


class Format(NamedTuple):
    """How the answer to a request is to be read."""

    tags: Tags | None = None
    """What thoughts stand between; None: the model has none."""
    is_open: bool = False
    """Has the prompt opened the thoughts?"""
    budget: int | None = None
    """Tokens that the thoughts may have."""
    dialect: Dialect | None = None
    """How tools are called; None: they are not."""
    names: Collection[str] = ()
    """Of the tools that may be called."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that are part of the form, and may be control tokens."""
        return (*(self.tags or ()), *(() if self.dialect is None else self.dialect.markers))

    @property
    def is_plain(self) -> bool:
        """Is all text the answer?"""
        return self.tags is None and self.dialect is None


class OutputParser:
    """Reads one answer. The pieces that it gives, joined, do not depend on how the text is cut."""

    def __init__(self, form: Format) -> None:
        self._form = form
        self._sink = Sink()
        self._parser = self._parse()
        next(self._parser)

    @property
    def is_thinking(self) -> bool:
        """Is the text inside of thoughts?"""
        return self._sink.is_thinking

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is wrong with the text."""
        return tuple(self._sink.warnings)

    @property
    def num_complete_calls(self) -> int:
        """Calls so far whose arguments are a whole JSON object."""
        return self._sink.num_complete

    def feed(self, text: str) -> list[Piece]:
        """What is certain now that `text` has come."""
        for character in text:
            self._parser.send(character)
        return self._sink.take()

    def finish(self) -> list[Piece]:
        """The rest: no more text comes."""
        try:
            self._parser.send("")
        except StopIteration:
            self._sink.finish()
        return self._sink.take()

    def _parse(self) -> Scan[None]:
        reader, form, sink = Reader(), self._form, self._sink
        had_thoughts = False
        if form.tags is not None:
            had_thoughts = yield from thoughts(reader, sink, form.tags, is_open=form.is_open)
        sink.trim(start=had_thoughts, end=form.dialect is not None)
        if form.dialect is not None:
            yield from form.dialect.parse(reader, sink, form.names)
        yield from reader.content(sink, [])
