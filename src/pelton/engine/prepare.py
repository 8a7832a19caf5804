"""A model before it is loaded: opened and introduced to a backend, its memory planned to the byte. A draft model
comes beside it, on the same threads."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from pelton.backends.base import Backend, BackendConfig, LoadSpec, find
from pelton.config import EngineConfig
from pelton.engine import machine
from pelton.engine.background import known_digest
from pelton.engine.budget import DraftNeeds, MemoryBudget, MemoryNeeds, Wishes, divide, required
from pelton.engine.protocol import Needs, Start
from pelton.engine.runner import Runner
from pelton.engine.same_vocabulary import Vocabulary, check_same_vocabulary
from pelton.errors import ConfigError, FormatError, UnsupportedModel
from pelton.formats import checkpoint as checkpoints
from pelton.formats.checkpoint import Checkpoint
from pelton.models.base import Model
from pelton.models.base import load as load_model
from pelton.ops.data import CacheGroup, kv_type_named

log = logging.getLogger(__name__)

BACKEND = "cpu"
MAX_THREADS = 1024
AT_LEAST_ZERO = (
    "target_itl", "swap_memory", "max_queue", "max_queue_tokens", "patience", "queue_timeout", "request_timeout",
    "processor_timeout",
)  # fmt: skip
"""Settings that may not be negative."""
DRAFT_TOKENS, DRAFT_SEQUENCES = 256, 16
"""The most of a draft model's step: it drafts for few sequences, and reads prompts in small chunks."""


class Prepared:
    """Reads the files' headers and no weight. `memory` says what the model takes, `wishes` what is set about it,
    `draft` what its draft model takes, if it has one."""

    def __init__(self, start: Start) -> None:
        """Raises FormatError, UnsupportedModel or ConfigError."""
        config = start.config
        self.start = start
        path = Path(start.model_path)
        checkpoint = checkpoints.open(path)
        if start.files not in (None, checkpoint.files):
            raise FormatError(
                f"{path}: the file was changed since it was first loaded; a server loads it anew with the next request"
            )
        self._model = _Opened(checkpoint, config, start)
        settings = BackendConfig(
            _num_threads(config), isa=config.isa or None, profile=config.profile, packed=start.packed
        )
        self._backend = find(BACKEND, settings)
        self.memory = _memory(self._backend, self._model.spec)
        self.wishes = Wishes(
            self._model.spec.max_context,
            is_fixed=config.context > 0,
            kv_memory=config.kv_memory,
            swap_memory=config.swap_memory,
            is_shared=start.is_shared,
        )
        self.draft: DraftNeeds | None = None
        self._draft_model: _Opened | None = None
        if start.draft_path is not None:
            draft = checkpoints.open(start.draft_path)
            self._draft_model = _Opened(draft, _draft_config(config), start)
            spec = self._draft_model.spec
            check_same_vocabulary(
                Vocabulary(path, checkpoint, self._model.spec.vocab_size),
                Vocabulary(Path(start.draft_path), draft, spec.vocab_size),
            )
            self.draft = DraftNeeds(_memory(self._backend, spec), spec.max_context)

    @property
    def needs(self) -> Needs:
        """What it takes, for whoever grants memory."""
        return Needs(*required(self.memory, self.wishes, self.draft))

    def plan(self, available: int) -> MemoryBudget:
        """How so many bytes are divided. Raises InsufficientMemory."""
        return divide(self.memory, self.wishes, available, self.draft)

    def load(self, plan: MemoryBudget, progress: Callable[[float], None] | None = None) -> Runner:
        """Load it. `progress` gets the share that is loaded."""
        log.info("%s: %s", self.start.model_path, plan)
        if plan.draft is None or self._draft_model is None:
            return self._model.load(self._backend, plan, progress)
        share = plan.draft.weights / (plan.weights + plan.draft.weights)
        draft = self._draft_model.load(self._backend, plan.draft, _part(progress, 0.0, share))
        return self._model.load(self._backend, plan, _part(progress, share, 1.0), draft)


class _Opened:
    """One of the models."""

    def __init__(self, checkpoint: Checkpoint, config: EngineConfig, start: Start) -> None:
        self._files = checkpoint.files
        model = load_model(checkpoint, config.context)
        self._width = model.config.width
        self.spec = replace(_spec(model, config), digest=known_digest(checkpoint.files, start.known))

    def load(
        self,
        backend: Backend,
        plan: MemoryBudget,
        progress: Callable[[float], None] | None,
        draft: Runner | None = None,
    ) -> Runner:
        """Load it, after the model that drafts for it."""
        spec = replace(self.spec, num_blocks=plan.num_blocks, max_context=plan.context)
        return Runner(
            backend.load(spec, progress),
            files=self._files,
            digest=spec.digest,
            windows=tuple(map(_window, spec.groups)),
            vocab_size=spec.vocab_size,
            width=self._width,
            max_tokens=spec.max_tokens,
            max_sequences=spec.max_sequences,
            plan=plan,
            draft=draft,
        )


def _part(progress: Callable[[float], None] | None, start: float, end: float) -> Callable[[float], None] | None:
    """The progress of a part of the whole."""
    if progress is None:
        return None
    return lambda share: progress(start + share * (end - start))


def _draft_config(config: EngineConfig) -> EngineConfig:
    """A draft model's steps are small, and its context is what it was trained for, as far as it is needed."""
    return msgspec.structs.replace(
        config,
        context=0,
        max_batch_tokens=min(config.max_batch_tokens, DRAFT_TOKENS),
        max_sequences=min(config.max_sequences, config.max_batch_tokens, DRAFT_SEQUENCES),
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
