"""What the runs of a draft model take."""

from __future__ import annotations

from dataclasses import dataclass

from pelton.engine.pace import Pace, Shape, num_pairs
from pelton.engine.sequence import Sequence

READY = 16
"""Tokens that a shadow may lag behind and be caught up within the first run of a draft."""


@dataclass
class Candidate:
    """A sequence that the draft model could draft for."""

    sequence: Sequence
    num_behind: int
    """Tokens to read before the next one can be drafted."""
    gains: list[float]
    """For each token of a draft, how likely it is accepted."""


class DraftCosts:
    """Of one draft model. `pace`: of the target's steps. `weight`: the draft model's size as a share of the target's,
    from which its speed is guessed until it is measured. `max_tokens`: of a run."""

    def __init__(self, pace: Pace, weight: float, max_tokens: int) -> None:
        self.ready = min(READY, max_tokens)
        """Tokens that a sequence may be behind when drafts are made for it."""
        self._pace = pace
        self._weight = weight
        self._own = Pace()
        self._is_timed = False

    def predict(self, shape: Shape) -> float:
        """Seconds that a run of the draft model takes."""
        return self._own.predict(shape) if self._is_timed else self._weight * self._pace.predict(shape)

    def first_run(self, chosen: list[Candidate]) -> float:
        """Seconds of the run that reads what is new of these, and drafts a token of each."""
        shape = Shape()
        for candidate in chosen:
            behind = min(candidate.num_behind, self.ready)
            start = candidate.sequence.num_tokens - behind
            shape = _sum(shape, Shape(behind, 1, start + behind, num_pairs(start, behind)))
        return self.predict(shape)

    def next_run(self, chosen: list[Candidate]) -> float:
        """Seconds of each run that drafts one token more of these."""
        num_read = sum(candidate.sequence.num_tokens for candidate in chosen)
        return self.predict(Shape(len(chosen), len(chosen), num_read, num_read))

    def read_seconds(self, num_read: int, num_tokens: int) -> float:
        """What reading so many tokens more takes, beside `num_read` that have been read."""
        if self._is_timed:
            return self._own.chunk_seconds(num_read, num_tokens)
        return self._weight * self._pace.chunk_seconds(num_read, num_tokens)

    def observe(self, shape: Shape, seconds: float) -> None:
        """A run of the draft model took so long."""
        self._own.observe(shape, seconds)
        self._is_timed = True


def _sum(one: Shape, other: Shape) -> Shape:
    return Shape(*(a + b for a, b in zip(one, other, strict=True)))
