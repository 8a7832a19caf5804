"""Scheduled sequences -> one step's flat arrays."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pelton.engine.sequence import Sequence
from pelton.ops.data import I32, NULL_BLOCK, Batch

if TYPE_CHECKING:
    from pelton.engine.work import Work


class Row(NamedTuple):
    """A logit row of a step: the token after its sequence's own and the first `offset` of its draft is to be drawn.
    Or, with a `target`, that one's logprob is asked for: a token of the prompt."""

    sequence: Sequence
    offset: int = 0
    target: int = -1


SPARE = 4
"""Blocks for which there are places in a step's tables beyond those that sequences have: as far as they go, the same
tables are those of the next steps."""


class Batches:
    """Makes the arrays of each step, for so many cache groups. Those of a steady step are advanced in place for the
    next one, by `advance`: each sequence has the token that it drew, a position more."""

    def __init__(self, num_groups: int, advance: Callable[[], None]) -> None:
        self._num_groups = num_groups
        self._advance = advance
        self._work: Work | None = None
        """The last step's."""
        self._made: tuple[Batch, list[Row]]
        self._tables: list[tuple[memoryview, int]] = []
        """Each with its width, flat."""

    def of(self, work: Work) -> tuple[Batch, list[Row]]:
        """The step's arrays, until the next one's are made, and what its logit rows are for."""
        if work is self._work:
            self._advance()
            if not self.can_keep(work):
                batch, rows = self._made
                self._keep(replace(batch, tables=tables(work.chunks, self._num_groups)), rows)
        else:
            self._keep(*build(work.chunks, self._num_groups))
            self._work = work
        return self._made

    def can_keep(self, work: Work) -> bool:
        """Bring the tables of the last step, which is repeated, up to date. False: they have no room."""
        for place in work.retabled:
            sequence = self._made[1][place].sequence
            for (kept, width), table in zip(self._tables, sequence.tables, strict=True):
                if len(table) > width:
                    return False
                start = place * width
                kept[start : start + len(table)] = table
        return True

    def _keep(self, batch: Batch, rows: list[Row]) -> None:
        self._made = batch, rows
        self._tables = [(table.reshape(-1).data, table.shape[1]) for table in batch.tables]


def build(chunks: dict[Sequence, int], num_groups: int) -> tuple[Batch, list[Row]]:
    """The arrays of one step, and what those of its logit rows are for that are not pooled. Each sequence brings its
    next tokens, those of its draft behind its own."""
    ids, positions, starts, logit_rows = array("i"), array("i"), array("i", (0,)), array("i")
    pooled_rows = array("i")
    rows: list[Row] = []
    for sequence, num_tokens in chunks.items():
        first, start = sequence.num_computed, len(ids)
        end = first + num_tokens
        pool = sequence.group.pool
        if pool is not None:
            pooled_rows.extend(start + place for place in pool.places(first, num_tokens))
            ids += sequence.tokens[first:end]
            positions.extend(range(first, end))
        elif num_tokens == 1 and end == len(sequence.tokens) and not sequence.children:  # a step has many of these
            ids.append(sequence.tokens[first])
            positions.append(first)
            logit_rows.append(start)
            rows.append(Row(sequence))
        else:
            for place, row in rows_of(sequence, num_tokens):
                logit_rows.append(start + place)
                rows.append(row)
            ids += sequence.tokens[first:end]
            ids += sequence.draft[: num_drafted(sequence, num_tokens)]
            positions.extend(range(first, end))
        starts.append(len(ids))
    return Batch(
        ids=_flat(ids),
        positions=_flat(positions),
        seq_starts=_flat(starts),
        tables=tables(chunks, num_groups),
        logit_rows=_flat(logit_rows + pooled_rows),
        num_pooled=len(pooled_rows),
    ), rows


def tables(sequences: Collection[Sequence], num_groups: int) -> tuple[I32, ...]:
    """Their block tables, per cache group."""
    return tuple(_table(sequences, group) for group in range(num_groups))


def _flat(numbers: array[int]) -> I32:
    return np.frombuffer(numbers, np.int32)


def num_drafted(sequence: Sequence, num_tokens: int) -> int:
    """How many of a sequence's next `num_tokens` tokens are of its draft."""
    return max(0, num_tokens - sequence.num_new)


def rows_of(sequence: Sequence, num_tokens: int) -> list[tuple[int, Row]]:
    """The rows of a sequence's next `num_tokens` tokens, each behind its token's place among these: one for each that
    stands before a token of the prompt to be scored, one for its last own token (one per choice that is to fork from
    it, too), and one for each of its draft."""
    first, last = sequence.num_computed, sequence.num_new - 1
    rows = [(i, Row(sequence, 0, sequence.tokens[first + i + 1])) for i in scored(sequence, num_tokens)]
    if last >= num_tokens:
        return rows
    rows += [(last, Row(choice)) for choice in (sequence, *sequence.children)]
    return rows + [(last + j, Row(sequence, j)) for j in range(1, num_tokens - last)]


def scored(sequence: Sequence, num_tokens: int) -> range:
    """Places, among a sequence's next `num_tokens` tokens, of those that score the token behind them."""
    first, end = sequence.group.num_scored - 1, sequence.num_prompt - 1
    return range(max(0, first - sequence.num_computed), min(num_tokens, end - sequence.num_computed))


def _table(sequences: Iterable[Sequence], group: int) -> I32:
    """[S, longest + SPARE]: block ids, padded with the null block."""
    rows = [sequence.tables[group] for sequence in sequences]
    width = max(map(len, rows)) + SPARE
    padding = array("i", [NULL_BLOCK]) * width
    flat = array("i")
    for row in rows:
        flat += row
        flat += padding[len(row) :]
    return _flat(flat).reshape(len(rows), width)
