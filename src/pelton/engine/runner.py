"""A model and a backend, introduced to each other: loaded once, then one submission per step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from pelton.backends.base import Backend, BackendConfig, Executor, LoadSpec, Pending, StepProfile, find
from pelton.config import EngineConfig
from pelton.engine import machine
from pelton.engine.background import Background, known_digest
from pelton.engine.budget import MemoryBudget, MemoryNeeds, divide
from pelton.engine.moves import Copy, Move, Restore, Save
from pelton.engine.protocol import Start
from pelton.errors import ConfigError, FormatError, UnsupportedModel
from pelton.formats import checkpoint as checkpoints
from pelton.formats.digest import ModelFile
from pelton.models.base import Model
from pelton.models.base import load as load_model
from pelton.ops.data import Batch, CacheGroup, kv_type_named

log = logging.getLogger(__name__)

MAX_THREADS = 1024
AT_LEAST_ZERO = (
    "target_itl", "swap_memory", "max_queue", "max_queue_tokens", "patience", "queue_timeout", "request_timeout",
)  # fmt: skip
"""Settings that may not be negative."""


class Runner:
    """A loaded model. `windows` and `num_blocks` are per cache group; `plan` says what memory it takes."""

    def __init__(
        self,
        executor: Executor,
        *,
        files: tuple[ModelFile, ...],
        digest: str | None,
        windows: tuple[int | None, ...],
        vocab_size: int,
        max_sequences: int,
        plan: MemoryBudget,
    ) -> None:
        self._executor = executor
        self.windows = windows
        self.num_blocks = plan.num_blocks
        self.vocab_size = vocab_size
        self.context = plan.context
        self.max_sequences = max_sequences
        self.plan = plan
        self.files = files
        self.digest = digest
        """Of the model's files; None while it is not known."""

    @classmethod
    def load(cls, start: Start, progress: Callable[[float], None] | None = None) -> Runner:
        """Open a checkpoint, plan its memory, load it. `progress` gets the share that is loaded.

        Raises FormatError, UnsupportedModel, ConfigError or InsufficientMemory before anything big is allocated.
        """
        path, config = Path(start.model_path), start.config
        checkpoint = checkpoints.open(path)
        if start.files not in (None, checkpoint.files):
            raise FormatError(f"{path}: the file was changed since it was first loaded; restart to serve the new one")
        model = load_model(checkpoint, config.context)
        threads = _num_threads(config)
        settings = BackendConfig(threads, isa=config.isa or None, profile=config.profile, packed=start.packed)
        backend = find("cpu", settings)
        digest = known_digest(checkpoint.files, start.known)
        spec = replace(_spec(model, config), digest=digest)
        plan = _plan(backend, spec, config)
        log.info("%s: %s", path.name, plan)
        executor = backend.load(replace(spec, num_blocks=plan.num_blocks, max_context=plan.context), progress)
        return cls(
            executor,
            files=checkpoint.files,
            digest=digest,
            windows=tuple(map(_window, spec.groups)),
            vocab_size=spec.vocab_size,
            max_sequences=spec.max_sequences,
            plan=plan,
        )

    @property
    def fingerprint(self) -> str | None:
        """The numerics fingerprint; None while the model's digest is not known."""
        return None if self.digest is None else self._executor.fingerprint(self.digest)

    def background(self, is_busy: Callable[[], bool], tell: Callable[[], None]) -> Background:
        """Begin what is done beside the steps."""
        return Background(self.files, self._executor, self.digest, is_busy=is_busy, tell=tell)

    def move(self, moves: Iterable[Move]) -> None:
        """Make the moves, in order."""
        for move in moves:
            match move:
                case Copy():
                    self._executor.kv_copy(*move)
                case Save(group, block, place, saved):
                    saved.data[group, place] = self.read_block(group, block)
                case Restore(group, block, place, saved):
                    self.write_block(group, block, saved.data[group, place])

    def submit(self, batch: Batch) -> Pending:
        """Start a step."""
        return self._executor.submit(batch)

    def read_block(self, group: int, block: int) -> bytes:
        """The backend's bytes of a block. From any thread."""
        return self._executor.kv_read(group, [block])

    def write_block(self, group: int, block: int, data: bytes) -> None:
        """Write back what `read_block` gave, to a block that no step touches meanwhile. From any thread."""
        self._executor.kv_write(group, [block], data)

    def profile(self) -> list[StepProfile]:
        """Where the time went; empty unless profiling is on."""
        return self._executor.profile()

    def close(self) -> None:
        """Give all memory back."""
        self._executor.close()


def _num_threads(config: EngineConfig) -> int:
    if not 0 <= config.threads <= MAX_THREADS:
        raise ConfigError(f"threads is {config.threads}, must be from 0 to {MAX_THREADS}", param="threads")
    return config.threads or machine.num_cores()


def _spec(model: Model, config: EngineConfig) -> LoadSpec:
    """Everything but the number of blocks, which depends on what the rest needs."""
    if config.max_batch_tokens < 1 or config.max_sequences < 1:
        raise ConfigError("max_batch_tokens and max_sequences must be at least 1", param="max_batch_tokens")
    for name in AT_LEAST_ZERO:
        if not getattr(config, name) >= 0:  # also where it is no number
            raise ConfigError(f"{name} is {getattr(config, name)}, must be at least 0", param=name)
    max_sequences = min(config.max_sequences, config.max_batch_tokens)
    if max_sequences < config.max_sequences:
        log.warning("only %d sequences run at once: each needs a token of the step's budget", max_sequences)
    return LoadSpec(
        record=model.step,
        weights=model.weights,
        groups=model.config.groups,
        vocab_size=model.config.vocab_size,
        kv_type=kv_type_named(config.kv_dtype),
        num_blocks=(2,) * len(model.config.groups),
        max_tokens=config.max_batch_tokens,
        max_sequences=max_sequences,
        max_context=model.config.context,
    )


def _window(group: CacheGroup) -> int | None:
    if group.kind not in ("full", "window"):
        raise UnsupportedModel(f"cache groups of kind {group.kind!r} are not supported")
    return group.window


def _plan(backend: Backend, spec: LoadSpec, config: EngineConfig) -> MemoryBudget:
    memory = backend.plan_memory(spec)
    needs = MemoryNeeds(
        weights=memory.weights,
        arena=memory.arena,
        bytes_per_block=memory.kv_per_block,
        windows=tuple(map(_window, spec.groups)),
        max_chunk=spec.max_tokens,
        max_sequences=spec.max_sequences,
    )
    return divide(
        needs,
        available=machine.free_memory(),
        kv_memory=config.kv_memory,
        swap_memory=config.swap_memory,
        context=spec.max_context,
        is_fixed=config.context > 0,
    )
