"""Runs sequences through an engine-like series of steps, on the reference or on a backend's executor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from pelton.backends.base import BackendConfig, Executor, LoadSpec, find
from pelton.formats.quants import WeightType
from pelton.models.base import Model
from pelton.ops import reference
from pelton.ops.data import BLOCK_TOKENS, I32, Batch, CacheGroup, KVType
from pelton.ops.memory import Memory

Logits = npt.NDArray[np.floating]
RunStep = Callable[[Batch], Logits]
"""One step: its batch -> [R, vocab]."""


def num_blocks(groups: Sequence[CacheGroup], num_sequences: int, length: int) -> tuple[int, ...]:
    per_sequence = -(-length // BLOCK_TOKENS)
    return tuple(1 + num_sequences * per_sequence for _ in groups)


def on_reference(
    model: Model,
    num_sequences: int,
    length: int,
    kv_type: KVType = "f32",
    family_of: Callable[[WeightType], reference.Family] = lambda type: "float",
    dtype: npt.DTypeLike = np.float32,
) -> RunStep:
    groups = model.config.groups
    memory = Memory(groups, num_blocks(groups, num_sequences, length), kv_type, dtype)
    weights = reference.bind(model.weights, dtype)
    return lambda batch: model.step(reference.Ops(batch, memory, family_of), weights, batch)


def scattered_tables(groups: Sequence[CacheGroup], num_sequences: int, length: int) -> list[I32]:
    """Per group [num_sequences, blocks]: scattered, interleaved over sequences, different in each group."""
    per_sequence = -(-length // BLOCK_TOKENS)
    tables = []
    for g in range(len(groups)):
        blocks = np.random.default_rng(g).permutation(num_sequences * per_sequence) + 1
        tables.append(blocks.reshape(num_sequences, per_sequence).astype(np.int32))
    return tables


def make_batch(
    sequences: Sequence[Sequence[int]],
    spans: Sequence[tuple[int, int, int]],
    tables: Sequence[I32],
    cross_lengths: Sequence[int] | None = None,
    num_logits: int | None = None,
) -> Batch:
    """One step over spans of (sequence, first position, end), with logits for the last `num_logits` rows of each
    (None: for all)."""
    active = [s for s, _, _ in spans]
    starts = np.cumsum([0, *(b - a for _, a, b in spans)]).astype(np.int32)
    wanted = [np.arange(a if num_logits is None else b - num_logits, b) for a, b in pairwise(starts)]
    ids = np.array([t for s, a, b in spans for t in sequences[s][a:b]], np.int32)
    return Batch(
        ids=ids,
        positions=np.concatenate([np.arange(a, b, dtype=np.int32) for _, a, b in spans]),
        seq_starts=starts,
        tables=tuple(table[active] for table in tables),
        logit_rows=np.concatenate(wanted).astype(np.int32),
        cross_lengths=None if cross_lengths is None else np.array(cross_lengths, np.int32)[active],
    )


def run(
    run_step: RunStep,
    groups: Sequence[CacheGroup],
    sequences: Sequence[Sequence[int]],
    plan: Sequence[Sequence[int]],
    cross_lengths: Sequence[int] | None = None,
) -> list[Logits]:
    """All logits of every sequence. `plan`: for each step how many tokens each sequence advances; 0: sits out."""
    tables = scattered_tables(groups, len(sequences), max(map(len, sequences)))
    done = [0] * len(sequences)
    collected: list[list[Logits]] = [[] for _ in sequences]
    for counts in plan:
        spans = [(s, done[s], done[s] + count) for s, count in enumerate(counts) if count]
        batch = make_batch(sequences, spans, tables, cross_lengths)
        rows = np.split(run_step(batch), batch.seq_starts[1:-1])
        for (s, _, stop), part in zip(spans, rows, strict=True):
            collected[s].append(part)
            done[s] = stop
    assert done == [len(s) for s in sequences]
    return [np.concatenate(parts) for parts in collected]


def error(got: Logits, want: Logits) -> float:
    """The largest difference, as a share of max|logit|."""
    assert got.shape == want.shape
    return float(np.abs(got - want).max() / np.abs(want).max())


def load_spec(
    model: Model, num_sequences: int, length: int, *, kv_type: KVType = "f32", max_tokens: int = 0
) -> LoadSpec:
    """What a backend needs to run `num_sequences` sequences of up to `length` tokens, all rows with logits."""
    groups = model.config.groups
    return LoadSpec(
        record=model.step,
        weights=model.weights,
        groups=groups,
        vocab_size=model.config.vocab_size,
        kv_type=kv_type,
        num_blocks=num_blocks(groups, num_sequences, length),
        max_tokens=max_tokens or num_sequences * length,
        max_sequences=max_tokens or num_sequences * length,
        max_context=length,
    )


def on_executor(executor: Executor) -> RunStep:
    return lambda batch: executor.submit(batch).logits()


def on_backend(
    model: Model, num_sequences: int, length: int, kv_type: KVType = "f32", num_threads: int = 2, isa: str | None = None
) -> RunStep:
    executor = find("cpu", BackendConfig(num_threads, isa)).load(
        load_spec(model, num_sequences, length, kv_type=kv_type)
    )
    return on_executor(executor)
