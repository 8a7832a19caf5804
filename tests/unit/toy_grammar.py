"""A grammar for tests of what is guessed under one: answers of a fixed length, and what may come at each place."""

from __future__ import annotations

from collections.abc import Sequence as Rows

from pelton.errors import InternalError, PeltonError

QUOTES = frozenset({80, 81, 82})
"""Tokens that begin alike."""


class Template:
    """A grammar of so many tokens: at each place these may come."""

    warnings = ()

    def __init__(self, places: Rows[frozenset[int]], at: int = 0, breaks_at: int = -1) -> None:
        self.places = places
        self.at = at
        self.breaks_at = breaks_at

    @property
    def is_finished(self) -> bool:
        return self.at == len(self.places)

    @property
    def error(self) -> PeltonError | None:
        return InternalError("it broke") if self.at == self.breaks_at else None

    def fork(self) -> Template:
        return Template(self.places, self.at, self.breaks_at)

    def accept(self, token: int) -> None:
        assert token in self.places[self.at]
        self.at += 1

    def check(self, drafts: Rows[int]) -> int:
        places = zip(drafts, self.places[self.at :], strict=False)
        return next((i for i, (token, place) in enumerate(places) if token not in place), len(drafts))

    def forced(self) -> list[int]:
        run: list[int] = []
        for place in self.places[self.at :]:
            if len(place) > 1:
                break
            run += place
        return run

    def begun(self) -> bytes:
        return b'"' if self.places[self.at] <= QUOTES else b""

    def fill(self, masks: object, drafts: Rows[int]) -> None:
        raise NotImplementedError
