"""Hidden states -> the one vector of a text.

States are added up in float32, in the order of their positions, whatever steps they come from: chunks, preemption and
what else is in a step change no bit of the sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pelton.ops.data import F32
from pelton.request import Pooling

if TYPE_CHECKING:
    from pelton.engine.sequence import Sequence


class Pool:
    """The vector of one text, as far as its states have come. `next`: the position whose state is awaited, which may
    not come from the prefix cache: that keeps no states."""

    def __init__(self, pooling: Pooling, num_tokens: int) -> None:
        first = num_tokens - 1 if pooling == "last" else 0
        self.next = first
        self._first = first
        self._end = 1 if pooling == "cls" else num_tokens
        self._sum: F32 | None = None

    def places(self, start: int, num_tokens: int) -> range:
        """Places, among the `num_tokens` tokens from position `start` on, of those whose states are awaited."""
        return range(self.next - start, min(num_tokens, self._end - start))

    def add(self, states: F32) -> None:
        """[n, D]: those of the next positions."""
        for state in states:
            if self._sum is None:
                self._sum = state.copy()
            else:
                self._sum += state
        self.next += len(states)

    @property
    def is_complete(self) -> bool:
        """Have all come?"""
        return self.next == self._end

    @property
    def vector(self) -> F32 | None:
        """[D], once it is complete; None: what the model computed is not a number."""
        assert self._sum is not None
        vector: F32 = self._sum / np.float32(self._end - self._first)
        return vector if np.isfinite(vector).all() else None


def pooled(chunks: dict[Sequence, int]) -> list[tuple[Sequence, int]]:
    """The sequences of a step that is about to be committed that are to become vectors, with how many of its pooled
    rows are each one's, in the order of those rows."""
    pools = [(sequence, num_tokens, sequence.group.pool) for sequence, num_tokens in chunks.items()]
    return [(each, len(pool.places(each.num_computed, count))) for each, count, pool in pools if pool is not None]
