"""Runs sequences through an engine-like series of steps, on the reference or on a backend's executor."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from pelton.models.base import Model
from pelton.ops import reference
from pelton.ops.data import BLOCK_TOKENS, Batch, CacheGroup, KVType
from pelton.ops.memory import Memory

Logits = npt.NDArray[np.floating]
RunStep = Callable[[Batch], Logits]
"""One step: its batch -> [R, vocab]."""


def num_blocks(groups: Sequence[CacheGroup], num_sequences: int, length: int) -> tuple[int, ...]:
    per_sequence = -(-length // BLOCK_TOKENS)
    return tuple(1 + num_sequences * per_sequence for _ in groups)


def on_reference(
    model: Model, num_sequences: int, length: int, kv_type: KVType = "f32", dtype: npt.DTypeLike = np.float32
) -> RunStep:
    groups = model.config.groups
    memory = Memory(groups, num_blocks(groups, num_sequences, length), kv_type, dtype)
    weights = reference.bind(model.weights, dtype)
    return lambda batch: model.step(reference.Ops(batch, memory), weights, batch)


def run(
    run_step: RunStep, groups: Sequence[CacheGroup], sequences: Sequence[Sequence[int]], plan: Sequence[Sequence[int]]
) -> list[Logits]:
    """All logits of every sequence. `plan`: for each step how many tokens each sequence advances; 0: sits out.

    Blocks are scattered and interleaved over sequences, and differ between groups.
    """
    longest = -(-max(map(len, sequences)) // BLOCK_TOKENS)
    tables = []
    for g in range(len(groups)):
        blocks = np.random.default_rng(g).permutation(len(sequences) * longest) + 1
        tables.append(blocks.reshape(len(sequences), longest).astype(np.int32))
    done = [0] * len(sequences)
    collected: list[list[Logits]] = [[] for _ in sequences]
    for counts in plan:
        active = [s for s, count in enumerate(counts) if count]
        spans = [(s, done[s], done[s] + counts[s]) for s in active]
        batch = Batch(
            ids=np.array([t for s, a, b in spans for t in sequences[s][a:b]], np.int32),
            positions=np.concatenate([np.arange(a, b, dtype=np.int32) for _, a, b in spans]),
            seq_starts=np.cumsum([0, *(b - a for _, a, b in spans)]).astype(np.int32),
            tables=tuple(table[active] for table in tables),
            logit_rows=np.arange(sum(counts), dtype=np.int32),
        )
        rows = np.split(run_step(batch), batch.seq_starts[1:-1])
        for (s, _, stop), part in zip(spans, rows, strict=True):
            collected[s].append(part)
            done[s] = stop
    assert done == [len(s) for s in sequences]
    return [np.concatenate(parts) for parts in collected]


def chunks(length: int, size: int) -> list[list[int]]:
    """One sequence in chunks."""
    return [[min(size, length - start)] for start in range(0, length, size)]


def error(got: Logits, want: Logits) -> float:
    """The largest difference, as a share of max|logit|."""
    assert got.shape == want.shape
    return float(np.abs(got - want).max() / np.abs(want).max())
