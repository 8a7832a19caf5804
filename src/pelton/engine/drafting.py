"""What a step with drafts is expected to bring, and the draft model's part of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from pelton.engine.pace import Shape
from pelton.engine.sequence import Sequence

LEAST_GAIN = 1.04
"""Predicted gain in speed below which nothing is drafted: predictions are off by a little."""
PAST = 0.8
"""At this share of the best speed, longer drafts are looked at no more."""


class Plan(NamedTuple):
    """What a step is expected to bring: tokens, in so many seconds. `lengths`: of the drafts by lookup."""

    lengths: dict[Sequence, int]
    num_tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.num_tokens / self.seconds


@dataclass
class Drafting:
    """The draft model's part of a step. `chunks`: the tokens of each sequence that its first run reads.
    `depths`: for which of these it drafts, and how many tokens at most."""

    chunks: dict[Sequence, int] = field(default_factory=dict)
    depths: dict[Sequence, int] = field(default_factory=dict)
    least: float = 0.0
    """Tokens per second that a further token has to bring."""
    row_seconds: float = 0.0
    """What a row more adds to the target's step."""
    earned: float = 0.0
    """Seconds of reading that are expected to be earned back, and not paid by the purse."""
    seconds: float = 0.0
    """What the runs took, once they have been made."""


def with_rows(shape: Shape, num_rows: int, context: int) -> Shape:
    """The shape of a step with so many drafted tokens more, each of which sees `context`."""
    return Shape(
        shape.num_tokens + num_rows,
        shape.num_rows + num_rows,
        shape.num_read + num_rows,
        shape.num_pairs + num_rows * context,
        shape.num_bytes,
    )
