"""Scheduled sequences -> one step's flat arrays."""

from __future__ import annotations

import numpy as np

from pelton.engine.sequence import Sequence
from pelton.ops.data import I32, Batch


def build(chunks: dict[Sequence, int], num_groups: int) -> Batch:
    """The arrays of one step. Each sequence brings its next tokens, and a logit row (one per choice that is to fork
    from it, too) where these are its last."""
    starts = np.zeros(len(chunks) + 1, np.int32)
    np.cumsum(np.fromiter(chunks.values(), np.int32, len(chunks)), out=starts[1:])
    ids = np.empty(starts[-1], np.int32)
    positions = np.empty(starts[-1], np.int32)
    logit_rows: list[int] = []
    at = 0
    for sequence, num_tokens in chunks.items():
        first, end = sequence.num_computed, at + num_tokens
        if num_tokens == 1:
            ids[at] = sequence.tokens[first]
            positions[at] = first
        else:
            ids[at:end] = sequence.tokens[first : first + num_tokens]
            positions[at:end] = np.arange(first, first + num_tokens)
        if first + num_tokens == len(sequence.tokens):
            logit_rows += [end - 1] * (1 + len(sequence.children))
        at = end
    tables = tuple(_table(list(chunks), group) for group in range(num_groups))
    return Batch(ids, positions, starts, tables, np.array(logit_rows, np.int32))


def _table(sequences: list[Sequence], group: int) -> I32:
    rows = [sequence.tables[group] for sequence in sequences]
    table = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for line, row in zip(table, rows, strict=True):
        line[: len(row)] = row
    return table
