"""A model before it is loaded: opened and introduced to a backend, its memory planned to the byte."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pelton.backends.base import Backend, BackendConfig, LoadSpec, find
from pelton.config import EngineConfig
from pelton.engine import machine
from pelton.engine.background import known_digest
from pelton.engine.budget import MemoryBudget, MemoryNeeds, Wishes, divide, required
from pelton.engine.protocol import Needs, Start
from pelton.engine.runner import Runner
from pelton.errors import ConfigError, FormatError, UnsupportedModel
from pelton.formats import checkpoint as checkpoints
from pelton.models.base import Model
from pelton.models.base import load as load_model
from pelton.ops.data import CacheGroup, kv_type_named

log = logging.getLogger(__name__)

MAX_THREADS = 1024
AT_LEAST_ZERO = (
    "target_itl", "swap_memory", "max_queue", "max_queue_tokens", "patience", "queue_timeout", "request_timeout",
)  # fmt: skip
"""Settings that may not be negative."""


class Prepared:
    """Reads the file's header and no weight. `memory` says what the model takes, `wishes` what is set about it."""

    def __init__(self, start: Start) -> None:
        """Raises FormatError, UnsupportedModel or ConfigError."""
        path, config = Path(start.model_path), start.config
        checkpoint = checkpoints.open(path)
        if start.files not in (None, checkpoint.files):
            raise FormatError(f"{path}: the file was changed since it was first loaded; restart to serve the new one")
        model = load_model(checkpoint, config.context)
        settings = BackendConfig(
            _num_threads(config), isa=config.isa or None, profile=config.profile, packed=start.packed
        )
        self.start = start
        self._files = checkpoint.files
        self._backend = find("cpu", settings)
        self._spec = replace(_spec(model, config), digest=known_digest(checkpoint.files, start.known))
        self.memory = _memory(self._backend, self._spec)
        self.wishes = Wishes(
            self._spec.max_context,
            is_fixed=config.context > 0,
            kv_memory=config.kv_memory,
            swap_memory=config.swap_memory,
            is_shared=start.is_shared,
        )

    @property
    def needs(self) -> Needs:
        """What it takes, for whoever grants memory."""
        return Needs(*required(self.memory, self.wishes))

    def plan(self, available: int) -> MemoryBudget:
        """How so many bytes are divided. Raises InsufficientMemory."""
        return divide(self.memory, self.wishes, available)

    def load(self, plan: MemoryBudget, progress: Callable[[float], None] | None = None) -> Runner:
        """Load it. `progress` gets the share that is loaded."""
        log.info("%s: %s", self.start.model_path, plan)
        spec = self._spec
        executor = self._backend.load(replace(spec, num_blocks=plan.num_blocks, max_context=plan.context), progress)
        return Runner(
            executor,
            files=self._files,
            digest=spec.digest,
            windows=self.memory.windows,
            vocab_size=spec.vocab_size,
            max_sequences=spec.max_sequences,
            plan=plan,
        )


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


def _memory(backend: Backend, spec: LoadSpec) -> MemoryNeeds:
    memory = backend.plan_memory(spec)
    return MemoryNeeds(
        weights=memory.weights,
        arena=memory.arena,
        bytes_per_block=memory.kv_per_block,
        windows=tuple(map(_window, spec.groups)),
        max_chunk=spec.max_tokens,
        max_sequences=spec.max_sequences,
    )
