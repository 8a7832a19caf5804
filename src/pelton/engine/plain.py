"""Streams of which nothing is to be told but their tokens, step after step: their steps look at no sequence."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np

from pelton.backends.base import Sampled
from pelton.engine.batch import Row
from pelton.engine.protocol import Stream
from pelton.ops.data import BLOCK_TOKENS


def is_told_plainly(row: Row) -> bool:
    """Is nothing told of a row but the token that it draws?"""
    group = row.sequence.group
    has_state = row.sequence.constraint is not None or group.request.sampling.mirostat_mode
    return group.num_logprobs is None and not has_state and row.sequence.state == "running"


class PlainRun:
    """Steady steps of such streams, told so. What they draw is kept here: their sequences are behind by it until
    `settle`. `sampled` is where each step leaves what it drew. `phases`: where in a block a sequence's length must be
    for its tables to change with it."""

    def __init__(self, rows: list[Row], sampled: Sampled, phases: Iterable[int]) -> None:
        self.rows = rows
        self.sampled = sampled
        self.sequences = [row.sequence for row in rows]
        self.streams: tuple[Stream, ...] = tuple((each.group.request.id, each.choice) for each in self.sequences)
        self.ends = np.array(sorted(frozenset[int]().union(*(each.group.end_ids for each in self.sequences))), np.int32)
        """A token that is none of these ends no answer."""
        self._num_left = min(each.max_length - each.num_tokens for each in self.sequences) - 1
        self._due: list[list[int]] = [[] for _ in range(BLOCK_TOKENS)]
        """Places of the sequences whose tables change with step n, by n % BLOCK_TOKENS."""
        for place, sequence in enumerate(self.sequences):
            for phase in phases:
                self._due[(phase - sequence.num_tokens + 1) % BLOCK_TOKENS].append(place)
        self._num_steps = 0
        self._drawn = array("i")
        """Tokens of the steps, one for each sequence, from step `_first` on."""
        self._first = 0
        self._given = [0] * len(rows)
        """Steps whose tokens each sequence has."""

    @property
    def can_go_on(self) -> bool:
        """Is there a step more that ends no answer by its length?"""
        return self._num_steps < self._num_left

    @property
    def num_behind(self) -> int:
        """Steps that some sequences may not have the tokens of."""
        return self._num_steps - self._first

    def add(self, drawn: bytes) -> list[int]:
        """A step has drawn these. The places of the sequences whose tables change with it."""
        self._drawn.frombytes(drawn)
        self._num_steps += 1
        return self._due[self._num_steps % BLOCK_TOKENS]

    def settle(self, place: int) -> None:
        """Give a sequence the tokens that it has drawn. All but the last of them are in memory."""
        sequence, num_rows = self.sequences[place], len(self.sequences)
        sequence.tokens += self._drawn[(self._given[place] - self._first) * num_rows + place :: num_rows]
        sequence.num_computed = len(sequence.tokens) - 1
        self._given[place] = self._num_steps

    def settle_all(self) -> None:
        """The same for each."""
        for place, given in enumerate(self._given):
            if given < self._num_steps:
                self.settle(place)
        del self._drawn[:]
        self._first = self._num_steps
