"""Scheduled sequences -> one step's flat arrays."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from pelton.engine.sequence import Sequence
from pelton.ops.data import I32, Batch


class Row(NamedTuple):
    """A logit row of a step: the token after its sequence's own and the first `offset` of its draft is to be drawn."""

    sequence: Sequence
    offset: int = 0


def build(chunks: dict[Sequence, int], num_groups: int) -> tuple[Batch, list[Row]]:
    """The arrays of one step, and what its logit rows are for. Each sequence brings its next tokens, those of its draft
    behind its own."""
    ids: list[int] = []
    positions: list[int] = []
    starts = [0]
    rows: list[Row] = []
    logit_rows: list[int] = []
    for sequence, num_tokens in chunks.items():
        first, end = sequence.num_computed, sequence.num_computed + num_tokens
        for place, row in rows_of(sequence, num_tokens):
            logit_rows.append(len(ids) + place)
            rows.append(row)
        ids += sequence.tokens[first:end]
        ids += sequence.draft[: num_drafted(sequence, num_tokens)]
        positions += range(first, end)
        starts.append(len(ids))
    batch = Batch(
        np.array(ids, np.int32),
        np.array(positions, np.int32),
        np.array(starts, np.int32),
        tuple(_table(chunks, group) for group in range(num_groups)),
        np.array(logit_rows, np.int32),
    )
    return batch, rows


def num_drafted(sequence: Sequence, num_tokens: int) -> int:
    """How many of a sequence's next `num_tokens` tokens are of its draft."""
    return max(0, num_tokens - sequence.num_new)


def rows_of(sequence: Sequence, num_tokens: int) -> list[tuple[int, Row]]:
    """The rows of a sequence's next `num_tokens` tokens, each behind its token's place among these: one for its last
    own token (one per choice that is to fork from it, too), and one for each of its draft."""
    last = sequence.num_new - 1
    if last >= num_tokens:
        return []
    rows = [(last, Row(choice)) for choice in (sequence, *sequence.children)]
    return rows + [(last + j, Row(sequence, j)) for j in range(1, num_tokens - last)]


def _table(sequences: Iterable[Sequence], group: int) -> I32:
    """[S, longest]: block ids, padded with the null block."""
    rows = [sequence.tables[group] for sequence in sequences]
    width = max(map(len, rows))
    table = np.zeros((len(rows), width), np.int32)
    flat = table.reshape(-1).data  # copies an array three times as fast as an ndarray's slice does
    for start, row in zip(range(0, table.size, width), rows, strict=True):
        flat[start : start + len(row)] = row
    return table
