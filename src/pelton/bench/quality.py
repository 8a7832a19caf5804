"""What quantised activations, rounded weights and a rounded KV cache cost: perplexity, and KL divergence from float32.

The baseline is the same model computed in float32: the file's weights dequantised, activations unrounded, keys and
values stored as float32. Candidates see the same windows of a text, one window at a time and a few rows of logits at
once, so that no vocabulary is too large.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from pelton import _core
from pelton.backends.base import BackendConfig, LoadSpec, find
from pelton.bench.divergence import F32, I32, Baseline, Quality, Tokens, summarise
from pelton.errors import ConfigError
from pelton.formats.quants import WeightType, block_size, dequantize, row_bytes
from pelton.models.base import Model
from pelton.ops import reference
from pelton.ops.data import BLOCK_TOKENS, Batch, CacheGroup, KVType, Weight
from pelton.ops.memory import Memory

STEP_TOKENS = 64
"""Tokens per step, and rows of logits that exist at once."""


class Candidate(Protocol):
    """A way to compute a model."""

    @property
    def name(self) -> str:
        """Its line of the table."""
        ...

    def logits(self, ids: I32) -> Iterator[F32]:
        """[n] tokens of a new sequence -> the logits of each, [at most STEP_TOKENS, vocab] at a time."""
        ...


@dataclass(frozen=True)
class Options:
    """What is compared. An empty tuple of instruction sets: the best that is here of every kernel family."""

    isas: tuple[str, ...] = ()
    kv_types: tuple[KVType, ...] = ("f16", "f32")
    references: tuple[reference.Family, ...] = ()
    num_threads: int = 1
    context: int = 512


def shipped_text() -> tuple[str, str]:
    """A text that is on every machine, and its name: the help topics of Python's standard library, by title."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[title] for title in sorted(topics))
    return text, f"pydoc_data.topics of Python {platform.python_version()}"


def cut(ids: Sequence[int], context: int, num_tokens: int, begin: int | None) -> list[I32]:
    """The text's first windows of `context` tokens, `num_tokens` in all, each after the begin token where there is
    one. Raises ConfigError where the text is too short."""
    if not 2 <= context <= num_tokens:
        raise ConfigError(f"tokens: {num_tokens} tokens hold no window of {context}", param="tokens")
    own = context - (begin is not None)
    count = num_tokens // context
    if len(ids) < count * own:
        raise ConfigError(f"tokens: the text has {len(ids)} tokens, {count * own} were asked", param="tokens")
    head = [] if begin is None else [begin]
    return [np.array([*head, *ids[i * own : (i + 1) * own]], np.int32) for i in range(count)]


def dequantised(model: Model) -> Model:
    """The same model with float32 weights."""
    weights = {}
    for name, weight in model.weights.items():
        rows = weight.data.reshape(-1, row_bytes(weight.type, weight.shape[-1]))
        values = dequantize(weight.type, rows).view(np.uint8).reshape(-1)
        weights[name] = Weight(name, WeightType.F32, weight.shape, values, weight.row_order)
    return replace(model, weights=weights)


def _batches(ids: I32, groups: Sequence[CacheGroup]) -> Iterator[Batch]:
    """The steps of one sequence that owns blocks 1, 2, ... of every group; all rows have logits."""
    table = np.arange(1, _num_blocks(ids.size), dtype=np.int32)[None]
    for start in range(0, ids.size, STEP_TOKENS):
        chunk = ids[start : start + STEP_TOKENS]
        rows = np.arange(chunk.size, dtype=np.int32)
        starts = np.array([0, chunk.size], np.int32)
        yield Batch(chunk, start + rows, starts, (table,) * len(groups), rows)


def _num_blocks(context: int) -> int:
    return 1 + -(-context // BLOCK_TOKENS)


class OnBackend:
    """A model on the CPU backend."""

    def __init__(self, name: str, model: Model, isa: str, kv_type: KVType, options: Options) -> None:
        self.name = name
        self._groups = model.config.groups
        spec = LoadSpec(
            record=model.step,
            weights=model.weights,
            groups=self._groups,
            vocab_size=model.config.vocab_size,
            kv_type=kv_type,
            num_blocks=(_num_blocks(options.context),) * len(self._groups),
            max_tokens=STEP_TOKENS,
            max_sequences=STEP_TOKENS,
            max_context=options.context,
        )
        self._executor = find("cpu", BackendConfig(options.num_threads, isa=isa or None)).load(spec)

    def logits(self, ids: I32) -> Iterator[F32]:
        """Step by step."""
        for batch in _batches(ids, self._groups):
            yield self._executor.submit(batch).logits()


class OnReference:
    """A model in NumPy, in the numerics of a kernel family that this machine may not have."""

    def __init__(
        self,
        model: Model,
        weights: Mapping[str, Any],
        family: reference.Family,
        kv_type: KVType,
        options: Options,
    ) -> None:
        self.name = f"reference {family}, kv {kv_type}"
        self._model = model
        self._family = family
        self._kv_type = kv_type
        self._num_blocks = (_num_blocks(options.context),) * len(model.config.groups)
        self._weights = weights

    def _family_of(self, type: WeightType) -> reference.Family:
        """As the kernels' tables choose: float weights have no integer product, F32 ones are never rounded."""
        is_float = type is WeightType.F32 or (self._family == "int8" and block_size(type) == 1)
        return "float" if is_float else self._family

    def logits(self, ids: I32) -> Iterator[F32]:
        """Step by step."""
        memory = Memory(self._model.config.groups, self._num_blocks, self._kv_type)
        for batch in _batches(ids, self._model.config.groups):
            ops = reference.Ops(batch, memory, self._family_of)
            yield self._model.step(ops, self._weights, batch)


def best_of_each_family() -> tuple[str, ...]:
    """The instruction sets that are here, best first, without those whose kernel families a better one has too."""
    chosen: dict[tuple[int, ...], str] = {}
    for isa in reversed(_core.isas()):
        machine = _core.Machine(isa, 1)
        chosen.setdefault(tuple(machine.family(type) for type in WeightType), isa)
    return tuple(chosen.values())


def load_baseline(model: Model, options: Options) -> Candidate:
    """What all are held against."""
    return OnBackend("baseline: float32, kv f32", dequantised(model), "", "f32", options)


def load_candidates(model: Model, options: Options) -> list[Candidate]:
    """Everything that `options` names, every one with every type of KV cache."""
    candidates: list[Candidate] = []
    weights = reference.bind(model.weights)  # once: they keep what they are turned into
    for kv_type in options.kv_types:
        candidates += [
            OnBackend(f"{isa}, kv {kv_type}", model, isa, kv_type, options)
            for isa in options.isas or best_of_each_family()
        ]
        candidates += [OnReference(model, weights, family, kv_type, options) for family in options.references]
    return candidates


def compare(
    baseline: Candidate,
    candidates: Sequence[Candidate],
    windows: Sequence[I32],
    progress: Callable[[list[Quality]], None] = lambda results: None,
) -> list[Quality]:
    """The baseline and every candidate over all windows. `progress` gets what is known after each window."""
    everyone = [baseline, *candidates]
    parts: list[list[Tokens]] = [[] for _ in everyone]
    results: list[Quality] = []
    for ids in windows:
        first = 0
        for expected, *others in zip(*(one.logits(ids) for one in everyone), strict=True):
            targets = ids[first + 1 : first + 1 + len(expected)]
            base = Baseline(expected[: targets.size], targets)
            for part, logits in zip(parts, [expected, *others], strict=True):
                part.append(base.measure(logits[: targets.size]))
            first += len(expected)
        results = [summarise(one.name, part) for one, part in zip(everyone, parts, strict=True)]
        progress(results)
    return results
