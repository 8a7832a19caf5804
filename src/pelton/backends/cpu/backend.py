"""The CPU backend: records a model once, packs its weights, and replays the plan in the compiled core."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pelton import _core
from pelton.backends.base import BackendConfig, LoadSpec, MemoryPlan, Permit, StepProfile
from pelton.backends.cpu import packing
from pelton.backends.cpu.lower import check, lower
from pelton.backends.cpu.plan import PlanKey, Recorder, WeightRefs, present, width_of
from pelton.backends.cpu.planner import Program, plan_program
from pelton.backends.cpu.profile import Profile
from pelton.backends.cpu.stored import StoredWeights
from pelton.errors import ConfigError, InsufficientMemory, InternalError, UnsupportedModel
from pelton.ops.data import F32, I32, Batch, CacheGroup
from pelton.ops.sampling import Processing, SampleArrays, Sampled, no_samples
from pelton.ops.spec import AttendSpec

KERNEL_VERSION = 4
"""Raised whenever a kernel's bits change: part of the numerics fingerprint."""


class CpuBackend:
    """This machine's processor. Every model loaded through one backend shares its threads."""

    name = "cpu"
    is_exact = True

    def __init__(self, config: BackendConfig) -> None:
        """Raises ConfigError for an instruction set that this build or this CPU lacks."""
        self.config = config
        isas = _core.isas()
        if config.isa and config.isa not in isas:
            raise ConfigError(f"isa: there is no {config.isa!r} here; this CPU has: {', '.join(isas)}", param="isa")
        self._machine = _core.Machine(config.isa or "", config.num_threads)

    def plan_memory(self, spec: LoadSpec) -> MemoryPlan:
        """Exact needs of `spec`, without reading the weights' bytes."""
        program = self._plan(spec)
        layout = packing.lay_out(program.weights, spec.weights, self._machine)
        return MemoryPlan(
            weights=layout.bytes,
            kv_per_block=tuple(_core.kv_block_bytes(**_kv_shape(group, spec.kv_type)) for group in spec.groups),
            arena=program.arena_bytes
            + self._workspace_bytes(program, spec)
            + self._machine.scratch_bytes(spec.max_tokens),
        )

    def load(self, spec: LoadSpec, progress: Callable[[float], None] | None = None) -> CpuExecutor:
        """Record, allocate, and pack the weights, or read them packed where that model's were kept. `progress` gets the
        share of weights that is there."""
        program = self._plan(spec)
        layout = packing.lay_out(program.weights, spec.weights, self._machine)
        try:
            caches = [
                _core.KVCache(**_kv_shape(group, spec.kv_type), num_blocks=num_blocks)
                for group, num_blocks in zip(spec.groups, spec.num_blocks, strict=True)
            ]
            core = _core.Program(
                self._machine,
                caches,
                arena=program.arena_bytes,
                workspace=self._workspace_bytes(program, spec),
                max_tokens=spec.max_tokens,
                profile=self.config.profile,
            )
            stored, memory = self._stored(layout, spec), None
            if stored is not None and spec.digest is not None:
                memory = stored.read(spec.digest, self._machine, progress)
            if memory is None:
                memory = packing.pack(layout, spec.weights, self._machine, progress)
        except MemoryError:
            raise InsufficientMemory("the system refused the memory that the model needs") from None
        lower(program, spec.weights, layout, memory, core)
        profile = Profile(program, spec.weights, layout, spec.kv_type) if self.config.profile else None
        return CpuExecutor(program, core, caches, spec, self._numerics(spec, program), memory, stored, profile)

    def _plan(self, spec: LoadSpec) -> Program:
        recorder = Recorder(spec.weights)
        refs = WeightRefs({name: weight.shape for name, weight in spec.weights.items()})
        plan = recorder.finish(spec.record(recorder, refs, recorder.batch))
        families = {
            name: packing.family_of(spec.weights[name], self._machine)
            for name in plan.weights
            if len(spec.weights[name].shape) == 2
        }
        key = PlanKey("step", self._machine.isa, spec.kv_type, spec.max_tokens, spec.max_rows)
        program = plan_program(plan, key, families, self._prepared_bytes)
        check(program)
        return program

    def _prepared_bytes(self, family: str, rows: int, width: int) -> int:
        return self._machine.prepared_bytes(packing.FAMILIES.index(family), rows, width)

    def _workspace_bytes(self, program: Program, spec: LoadSpec) -> int:
        attends = (step.attrs["spec"] for phase in program.phases for step in phase.steps if step.op == "attend")
        return max((self._attend_workspace(attend, spec) for attend in attends), default=0)

    def _stored(self, layout: packing.Layout, spec: LoadSpec) -> StoredWeights | None:
        if self.config.packed is None:
            return None
        key = packing.layout_key(layout, spec.weights, self._machine)
        return StoredWeights(self.config.packed, key, layout.bytes)

    def _numerics(self, spec: LoadSpec, program: Program) -> str:
        """All that bits depend on, but for the model's files."""
        steps = repr((program.phases, program.head))  # with every number that the file's metadata gave them
        parts = (packing.PACKED_VERSION, KERNEL_VERSION, self._machine.isa, spec.kv_type, steps)
        return hashlib.blake2b("\n".join(map(str, parts)).encode(), digest_size=16).hexdigest()

    def _attend_workspace(self, attend: AttendSpec, spec: LoadSpec) -> int:
        return _core.attend_workspace(
            num_kv_heads=attend.num_kv_heads,
            head_dim=attend.head_dim,
            value_dim=attend.value_dim,
            type=spec.kv_type,
            num_heads=attend.num_heads,
            max_context=spec.max_context,
            num_threads=self._machine.num_threads,
        )


def make(config: BackendConfig) -> CpuBackend:
    """What `backends.base.find` calls."""
    return CpuBackend(config)


def _kv_shape(group: CacheGroup, kv_type: str) -> dict[str, Any]:
    if group.kind not in ("full", "window"):
        raise UnsupportedModel(f"the CPU backend has no memory yet for cache groups of kind {group.kind!r}")
    return {
        "num_layers": group.num_layers,
        "num_kv_heads": group.num_kv_heads,
        "head_dim": group.head_dim,
        "value_dim": group.value_dim,
        "type": kv_type,
    }


class CpuExecutor:
    """A loaded model. `submit` runs the step before it returns; only sampling is put off."""

    def __init__(
        self,
        program: Program,
        core: _core.Program,
        caches: list[_core.KVCache],
        spec: LoadSpec,
        numerics: str,
        weights: _core.Memory,
        stored: StoredWeights | None,
        profile: Profile | None,
    ) -> None:
        self._program = program
        self._core: _core.Program | None = core
        self._caches = caches
        self._limits = (spec.max_tokens, spec.max_rows)
        self._vocab_size = spec.vocab_size
        self._numerics = numerics
        self._weights: _core.Memory | None = weights
        self._stored = stored
        self._profile = profile
        self._num_steps = 0
        self._submitted: tuple[Batch, _core.Step] | None = None
        """The last step's."""
        self._sampled: tuple[SampleArrays, Sampled, _core.Drawing] | None = None
        """Of the last step that was sampled."""

    def submit(self, batch: Batch) -> CpuPending:
        """Run one step. Raises InternalError for a batch beyond the limits that the model was loaded with."""
        core = self._loaded
        if self._submitted is None or self._submitted[0] is not batch:
            self._submitted = batch, self._step_of(batch)
        if self._profile is not None:
            self._profile.observe(batch)
        core.run(self._submitted[1])
        self._num_steps += 1
        return CpuPending(self, core, self._num_steps, batch.logit_rows.size - batch.num_pooled, batch.num_pooled)

    def _step_of(self, batch: Batch) -> _core.Step:
        if batch.ids.size > self._limits[0] or batch.logit_rows.size > self._limits[1]:
            raise InternalError(
                f"a step of {batch.ids.size} tokens and {batch.logit_rows.size} logit rows; "
                f"the model was loaded for {self._limits[0]} and {self._limits[1]}"
            )
        return _core.Step(
            batch.ids, batch.positions, batch.seq_starts, batch.tables, batch.logit_rows, batch.num_pooled
        )

    def advance(self) -> None:
        """Make the last step the next one, in place."""
        _core.advance(*self._last)

    def proceed(self, ends: I32) -> bytes | None:
        """`advance`, submit and sample in one. None where any row has an error or drew one of `ends`."""
        core = self._loaded
        step, drawing = self._last
        if self._profile is not None and self._submitted is not None:
            self._profile.observe(self._submitted[0])
        self._num_steps += 1
        return core.proceed(step, drawing, ends)

    @property
    def _last(self) -> tuple[_core.Step, _core.Drawing]:
        if self._submitted is None or self._sampled is None:
            raise InternalError("there is no step yet to go on from")
        return self._submitted[1], self._sampled[2]

    @property
    def width(self) -> int:
        """Of what the head reads."""
        assert self._program.head is not None
        return width_of(present(self._program.head.ins[0]).shape[1])

    def kv_copy(self, group: int, src: int, dst: int, num_tokens: int) -> None:
        """Copy the first `num_tokens` slots of a block, in all the group's layers (the others come along)."""
        self._caches[group].copy(src, dst)

    def kv_read(self, group: int, blocks: Sequence[int]) -> bytes:
        """The opaque bytes of some blocks."""
        return self._caches[group].read(np.asarray(blocks, np.int32))

    def kv_write(self, group: int, blocks: Sequence[int], data: bytes) -> None:
        """Write back what `kv_read` gave."""
        self._caches[group].write(np.asarray(blocks, np.int32), data)

    def dump(self) -> str:
        """The program as text."""
        return self._program.dump()

    def profile(self) -> list[StepProfile]:
        """Where the time went, per kind of step that has run; empty unless profiling is on."""
        return [] if self._profile is None else self._profile.steps(self._loaded.timings())

    def fingerprint(self, digest: str) -> str:
        """The numerics fingerprint with a model of that digest: equal fingerprints give equal bits."""
        return hashlib.blake2b(f"{digest}\n{self._numerics}".encode(), digest_size=16).hexdigest()

    def store(self, digest: str, permit: Permit) -> None:
        """Keep the packed weights for the next start, if they are not there yet."""
        weights = self._weights
        if self._stored is not None and weights is not None:
            self._stored.write(digest, weights, lambda: self._weights is not None and permit())

    def close(self) -> None:
        """Give all memory back. Steps still pending can no longer be sampled."""
        self._core = None
        self._submitted = self._sampled = None
        self._caches = []
        self._weights = None

    def _sample(self, num_rows: int, params: SampleArrays, processing: Processing | None) -> Sampled:
        """What is filled in is the same as for the step before where that had the same parameters."""
        if self._sampled is None or self._sampled[0] is not params:
            out = no_samples(num_rows, params)
            self._sampled = params, out, _core.Drawing(params, out, num_rows, self._vocab_size)
        _, out, drawing = self._sampled
        self._loaded.sample(drawing, processing)
        return out

    @property
    def _loaded(self) -> _core.Program:
        if self._core is None:
            raise InternalError("the model is closed")
        return self._core


class CpuPending:
    """A step that has run; its last hidden rows wait for the head."""

    def __init__(self, executor: CpuExecutor, core: _core.Program, step: int, num_rows: int, num_pooled: int) -> None:
        self._executor = executor
        self._num_pooled = num_pooled
        self._core = core
        self._step = step
        self._num_rows = num_rows

    def _check(self) -> None:
        if self._executor._num_steps != self._step:
            raise InternalError("a step must be sampled before the next one is submitted")

    def sample(self, params: SampleArrays, processing: Processing | None = None) -> Sampled:
        """Draw one token per logit row that is not pooled."""
        self._check()
        return self._executor._sample(self._num_rows, params, processing)

    def states(self) -> F32:
        """[P, D]: the final hidden states of the pooled rows."""
        self._check()
        out = np.empty((self._num_pooled, self._executor.width), np.float32)
        self._core.states(out)
        return out

    def logits(self) -> F32:
        """[R - P, vocab] whole logits."""
        self._check()
        out = np.empty((self._num_rows, self._executor._vocab_size), np.float32)
        self._core.logits(out)
        return out

    def wait(self) -> None:
        """Nothing to wait for: the step ran in `submit`."""
