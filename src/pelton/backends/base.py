"""What a backend offers to the engine, and the flat data that crosses between them.

The runner introduces a model to a backend: `load` records the model over the backend's own `Ops` and packs its
weights; `submit` runs one step; `Pending.sample` draws tokens. The layout of KV memory is the backend's
own; it can be moved with `kv_copy`, `kv_read` and `kv_write`, whose bytes are opaque.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

from pelton.errors import ConfigError
from pelton.formats.bounded_folder import BoundedFolder
from pelton.ops.data import BLOCK_TOKENS as BLOCK_TOKENS
from pelton.ops.data import F32, I32, KVType
from pelton.ops.data import NULL_BLOCK as NULL_BLOCK
from pelton.ops.data import U8 as U8
from pelton.ops.data import Batch as Batch
from pelton.ops.data import CacheGroup as CacheGroup
from pelton.ops.data import Weight as Weight
from pelton.ops.sampling import BAD_LOGITS as BAD_LOGITS
from pelton.ops.sampling import NO_TOKEN as NO_TOKEN
from pelton.ops.sampling import Processing as Processing
from pelton.ops.sampling import SampleArrays as SampleArrays
from pelton.ops.sampling import Sampled as Sampled
from pelton.ops.sampling import greedy_rows as greedy_rows

Permit = Callable[[], bool]
"""Called between pieces of background work: waits while there is something better to do. False: give up."""

NAMES = ("cpu",)
"""The backends of this build."""


class Pending(Protocol):
    """A submitted step."""

    def sample(self, params: SampleArrays, processing: Processing | None = None) -> Sampled:
        """Draw one token per logit row that is not pooled. Blocks until the step has run. The result holds until
        the next step is sampled."""
        ...

    def states(self) -> F32:
        """[P, D]: the final hidden states of the pooled rows, which are not sampled. Blocks until the step has run."""
        ...

    def logits(self) -> F32:
        """[R - P, vocab] whole logits, for tests and `bench quality`; costs memory."""
        ...

    def wait(self) -> None:
        """Block until the step has run; for steps whose rows are not sampled."""
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

    def advance(self) -> None:
        """Make the last step the next one, in place: in the arrays that it was submitted and sampled with each sequence
        has the token that it drew, a position on. For steps of one token and one logit row per sequence."""
        ...

    def proceed(self, ends: I32) -> bytes | None:
        """`advance`, submit and sample in one. The ids that were drawn, as int32; None where any row has an error or
        drew one of `ends`. Whatever comes, what the last `sample` gave holds what was drawn."""
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

    def profile(self) -> list[StepProfile]:
        """Where the time went, per kind of step that has run; empty unless profiling is on."""
        ...

    def fingerprint(self, digest: str) -> str:
        """The numerics fingerprint with a model of that digest: equal fingerprints give equal bits."""
        ...

    def store(self, digest: str, permit: Permit) -> None:
        """Keep what makes the next start of the model with that digest fast, if that is not there yet. Called once,
        from a thread of its own, while steps run; `close` may come meanwhile. Nothing that fails is an error."""
        ...

    def close(self) -> None:
        """Give all memory back."""
        ...


@dataclass(frozen=True)
class OpTime:
    """One kind of op with one kind of weight, over all layers and all runs."""

    name: str
    calls: int = 0
    seconds: float = 0.0
    num_bytes: int = 0
    """Of weights, or of keys and values, that were read; 0: not counted."""
    operations: int = 0
    """Multiplications and additions, each counted; 0: not counted."""
    family: str = ""
    """The kernel family of a product."""


@dataclass(frozen=True)
class StepProfile:
    """All ops of one kind of step, those that took most time first. The time outside the core is among them."""

    work: str
    num_steps: int
    ops: tuple[OpTime, ...]

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(op.seconds for op in self.ops)


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
    max_sequences: int  # upper bound of S in one step, and of R - T
    max_context: int
    digest: str | None = None  # of the model's files; None: not known yet

    @property
    def max_rows(self) -> int:
        """Upper bound of R in one step: a row for each token, and for each choice that forks from one."""
        return self.max_tokens + self.max_sequences


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
    packed: BoundedFolder | None = None  # None: packed weights are not kept


def module(name: str) -> ModuleType:
    """The code of that backend, `pelton.backends.<name>.backend`. Raises `ConfigError` for an unknown name."""
    if name not in NAMES:
        raise ConfigError(f"there is no backend named {name!r}; this build has: {', '.join(NAMES)}")
    return importlib.import_module(f"pelton.backends.{name}.backend")


def find(name: str, config: BackendConfig) -> Backend:
    """The backend of that name, by the `make` of its module."""
    backend: Backend = module(name).make(config)
    return backend
