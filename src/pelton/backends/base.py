"""What a backend offers to the engine, and the flat data that crosses between them.

The runner introduces a model to a backend: `load` records the model over the backend's own `Ops` and packs its
weights; `submit` runs one step; `Pending.sample` draws tokens. The layout of KV memory is the backend's
own; it can be moved with `kv_copy`, `kv_read` and `kv_write`, whose bytes are opaque.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pelton.errors import ConfigError
from pelton.ops.data import BLOCK_TOKENS as BLOCK_TOKENS
from pelton.ops.data import F32, I32, KVType
from pelton.ops.data import NULL_BLOCK as NULL_BLOCK
from pelton.ops.data import U8 as U8
from pelton.ops.data import Batch as Batch
from pelton.ops.data import CacheGroup as CacheGroup
from pelton.ops.data import Weight as Weight


@dataclass(frozen=True)
class SampleArrays:
    """Per-row sampling parameters of the R rows of `logit_rows`. Sparse lists are CSR: row r owns entries
    offsets[r] .. offsets[r+1]-1. Temperature 0 is greedy. The order of the chain stands in `engine.sampling`.
    """

    temperature: F32
    top_p: F32
    min_p: F32
    top_k: I32  # 0: all
    seed: npt.NDArray[np.uint64]
    choice: I32
    position: I32  # output position: 0 for the first generated token
    repetition: F32
    presence: F32
    frequency: F32
    history_offsets: I32  # [R + 1] tokens that penalties look at
    history_ids: I32
    history_counts: I32  # times in the output; 0: in the prompt only
    bias_offsets: I32  # [R + 1] logit_bias; -inf bans a token
    bias_ids: I32
    bias_values: F32
    num_logprobs: int = 0  # the largest over the rows, -1: none wanted
    masks: npt.NDArray[np.uint32] | None = None  # [R, ceil(vocab/32)] bits of allowed tokens
    mask_rows: I32 | None = None  # [R] row of `masks` for each row, -1: none


@dataclass(frozen=True)
class Sampled:
    """What sampling drew. Logprobs are of the raw model distribution (before penalties, bias, temperature)."""

    ids: I32  # [R]
    logprobs: F32  # [R] of the drawn ids; zeros where none were wanted
    top_ids: I32  # [R, num_logprobs]
    top_logprobs: F32


NAMES = ("cpu",)
"""The backends of this build."""


class Pending(Protocol):
    """A submitted step."""

    def sample(self, params: SampleArrays) -> Sampled:
        """Draw one token per logit row. Blocks until the step has run."""
        ...

    def logits(self) -> F32:
        """[R, vocab] whole logits, for tests and `bench quality`; costs memory."""
        ...

    def wait(self) -> None:
        """Block until the step has run; for steps without logit rows."""
        ...


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that a model needs in the engine process, exact before load."""

    weights: int
    kv_per_block: tuple[int, ...]  # per cache group
    arena: int


class Executor(Protocol):
    """A loaded model: weights packed, plan recorded, KV memory allocated."""

    def submit(self, batch: Batch) -> Pending:
        """Start one step."""
        ...

    def kv_copy(self, group: int, src: int, dst: int, num_tokens: int) -> None:
        """Copy the first `num_tokens` slots of a block, in all the group's layers."""
        ...

    def kv_read(self, group: int, blocks: Sequence[int]) -> bytes:
        """The opaque bytes of some blocks."""
        ...

    def kv_write(self, group: int, blocks: Sequence[int], data: bytes) -> None:
        """Write back what `kv_read` gave."""
        ...

    def dump(self) -> str:
        """The plan as text."""
        ...

    @property
    def fingerprint(self) -> str:
        """The numerics fingerprint: equal fingerprints give equal bits."""
        ...

    def close(self) -> None:
        """Give all memory back."""
        ...


@dataclass(frozen=True)
class LoadSpec:
    """Everything a backend needs to load one model. `record(ops, weights, batch)` is the model's step function
    with its config bound; it is called once with the backend's own ops and refs."""

    record: Callable[[Any, Mapping[str, Any], Any], Any]
    weights: Mapping[str, Weight]
    groups: tuple[CacheGroup, ...]
    vocab_size: int
    kv_type: KVType
    num_blocks: tuple[int, ...]  # per cache group, block 0 (NULL_BLOCK) included
    max_tokens: int  # upper bound of T in one step
    max_sequences: int  # upper bound of S and of R in one step
    max_context: int


class Backend(Protocol):
    """One kind of device. Found by name through `backends.base.find`."""

    name: str
    is_exact: bool

    def plan_memory(self, spec: LoadSpec) -> MemoryPlan:
        """Exact needs of `spec`, without reading the weights' bytes."""
        ...

    def load(self, spec: LoadSpec, progress: Callable[[float], None] | None = None) -> Executor:
        """Pack, record, allocate. `progress` gets the share of weights that is packed."""
        ...


@dataclass(frozen=True)
class BackendConfig:
    """What is set from outside for every backend."""

    num_threads: int
    isa: str | None = None  # None: the best this machine has
    profile: bool = False
    pin_threads: bool = False


def find(name: str, config: BackendConfig) -> Backend:
    """The backend of that name: `pelton.backends.<name>.backend.make`. Raises `ConfigError` for an unknown one."""
    if name not in NAMES:
        raise ConfigError(f"there is no backend named {name!r}; this build has: {', '.join(NAMES)}")
    backend: Backend = importlib.import_module(f"pelton.backends.{name}.backend").make(config)
    return backend
