"""Scheduled sequences -> one step's flat arrays."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from pelton.engine.sequence import Sequence
from pelton.ops.data import I32, Batch


def build(chunks: dict[Sequence, int], num_groups: int) -> Batch:
    """The arrays of one step. Each sequence brings its next tokens, and a logit row (one per choice that is to fork
    from it, too) where these are its last."""
    ids: list[int] = []
    positions: list[int] = []
    starts = [0]
    logit_rows: list[int] = []
    for sequence, num_tokens in chunks.items():
        first, end = sequence.num_computed, sequence.num_computed + num_tokens
        ids += sequence.tokens[first:end]
        positions += range(first, end)
        starts.append(len(ids))
        if end == len(sequence.tokens):
            logit_rows += [len(ids) - 1] * (1 + len(sequence.children))
    return Batch(
        np.array(ids, np.int32),
        np.array(positions, np.int32),
        np.array(starts, np.int32),
        tuple(_table(chunks, group) for group in range(num_groups)),
        np.array(logit_rows, np.int32),
    )


def _table(sequences: Iterable[Sequence], group: int) -> I32:
    """[S, longest]: block ids, padded with the null block."""
    rows = [sequence.tables[group] for sequence in sequences]
    width = max(map(len, rows))
    table = np.zeros((len(rows), width), np.int32)
    flat = table.reshape(-1).data  # copies an array three times as fast as an ndarray's slice does
    for start, row in zip(range(0, table.size, width), rows, strict=True):
        flat[start : start + len(row)] = row
    return table
