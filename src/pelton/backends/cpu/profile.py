"""Where the time of a model's steps goes, by op and weight: the core's timings with names, and the work done."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pelton import _core
from pelton.backends.base import OpTime, StepProfile
from pelton.backends.cpu.packing import Layout
from pelton.backends.cpu.plan import Step, present
from pelton.backends.cpu.planner import Phase, Program
from pelton.ops.data import BLOCK_TOKENS, I32, Batch, KVType, Weight
from pelton.ops.spec import AttendSpec, R, T

WORKS = ("decode", "prompt")
"""Steps in which each sequence has one token, and all others; in the order of the core's timings."""
CoreTimings = Sequence[tuple[Sequence[tuple[int, int]], int]]
"""Per kind of step: (nanoseconds, runs) of each phase, of the head and of sampling; CPU nanoseconds between calls."""

DRAWN = "rows drawn"
"""The rows that the head is for: a count of work."""
_LAYER = re.compile(r"\blayers\.\d+\.")


@dataclass(frozen=True)
class _Op:
    """A phase's name, and its work per run and per unit of one count."""

    name: str
    counted: str = T
    bytes_per_run: int = 0
    bytes_per_unit: int = 0
    operations_per_unit: int = 0
    reads: str = ""
    """Count of units that bytes are of, where that is another one."""
    family: str = ""


class Profile:
    """Counts the work of each step that is submitted; puts names to the core's timings of it."""

    def __init__(self, program: Program, weights: Mapping[str, Weight], layout: Layout, kv_type: KVType) -> None:
        self._weights = weights
        self._layout = layout
        self._kv_type = kv_type
        self._windows: set[int | None] = set()
        self._ops = [self._of_phase(phase) for phase in program.phases]
        head = [] if program.head is None else [program.head]
        self._ops += [self._of_linears(head, DRAWN, "head"), _Op("sampling", DRAWN)]
        self._counts: tuple[Counter[str], Counter[str]] = (Counter(), Counter())

    def _of_phase(self, phase: Phase) -> _Op:
        if phase.kind == "linear":
            return self._of_linears(phase.steps, str(phase.rows), "linear")
        step = phase.steps[0]
        if step.op == "attend":
            return self._of_attention(step.attrs["spec"])
        return _Op("+".join(dict.fromkeys(step.op for step in phase.steps)), str(phase.rows))

    def _of_linears(self, steps: Sequence[Step], rows: str, name: str) -> _Op:
        names = [present(ref).name for step in steps for ref in step.ins[1::3] if ref and ref.name in self._weights]
        names = [name for name in names if len(self._weights[name].shape) == 2]
        families = {step.attrs.get("family") or present(step.ins[0]).name.rpartition(".")[2] for step in steps}
        shapes = [self._weights[name].shape for name in names]
        types = dict.fromkeys(self._weights[name].type.name for name in names)
        return _Op(
            f"{name} {_joined(names)} {'+'.join(types)}",
            rows,
            bytes_per_run=sum(self._layout.slots[name].bytes for name in names),
            operations_per_unit=sum(2 * n * k for n, k in shapes),
            family=min(families, default=""),
        )

    def _of_attention(self, spec: AttendSpec) -> _Op:
        self._windows.add(spec.window)
        width = spec.head_dim + spec.value_dim
        window = "" if spec.window is None else f" window {spec.window}"
        return _Op(
            f"attend {spec.num_heads}/{spec.num_kv_heads}x{spec.head_dim}{window}",
            _pairs(spec.window),
            bytes_per_unit=_core.kv_block_bytes(
                num_layers=1,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                value_dim=spec.value_dim,
                type=self._kv_type,
            )
            // BLOCK_TOKENS,
            operations_per_unit=2 * spec.num_heads * width,
            reads=_keys(spec.window),
        )

    def observe(self, batch: Batch) -> None:
        """Count a step that runs."""
        counts = self._counts[batch.ids.size != batch.seq_starts.size - 1]
        counts["steps"] += 1
        counts[T] += batch.ids.size
        counts[R] += batch.logit_rows.size
        counts[DRAWN] += batch.logit_rows.size - batch.num_pooled
        for window in self._windows:
            counts[_pairs(window)] += int(_seen(batch.positions, window).sum())
            counts[_keys(window)] += _num_keys(batch, window)

    def steps(self, timings: CoreTimings) -> list[StepProfile]:
        """Each kind of step that has run, with its ops; those that took most time first."""
        kinds = zip(WORKS, self._counts, timings, strict=True)
        return [self._steps(work, counts, *times) for work, counts, times in kinds if counts["steps"]]

    def _steps(self, work: str, counts: Counter[str], phases: Sequence[tuple[int, int]], outside: int) -> StepProfile:
        totals: dict[str, OpTime] = {}
        for op, (nanoseconds, runs) in zip(self._ops, phases, strict=True):
            if not runs:
                continue
            before = totals.get(op.name, OpTime(op.name, family=op.family))
            totals[op.name] = OpTime(
                op.name,
                calls=before.calls + runs,
                seconds=before.seconds + nanoseconds / 1e9,
                num_bytes=before.num_bytes + op.bytes_per_run * runs + op.bytes_per_unit * counts[op.reads],
                operations=before.operations + op.operations_per_unit * counts[op.counted],
                family=op.family,
            )
        totals["outside the core"] = OpTime("outside the core", counts["steps"], outside / 1e9)
        ops = sorted(totals.values(), key=lambda op: -op.seconds)
        return StepProfile(work, counts["steps"], tuple(ops))


def _joined(names: Sequence[str]) -> str:
    """`layers.*.q|k|v` for layers.3.q, layers.3.k and layers.3.v."""
    first = _LAYER.search(names[0])
    if first is None:
        return "|".join(names)
    prefix = names[0][: first.end()]
    return prefix[: first.start()] + "layers.*." + "|".join(name.removeprefix(prefix) for name in names)


def _pairs(window: int | None) -> str:
    return f"pairs of tokens and keys, window {window}"


def _keys(window: int | None) -> str:
    return f"keys, window {window}"


def _seen(positions: I32, window: int | None) -> I32:
    """Keys that the token at each position sees."""
    seen: I32 = positions + 1 if window is None else np.minimum(positions + 1, window)
    return seen


def _num_keys(batch: Batch, window: int | None) -> int:
    """Keys that are read once for each sequence: from the first that its first token sees to its last token's."""
    first, last = batch.positions[batch.seq_starts[:-1]], batch.positions[batch.seq_starts[1:] - 1]
    return int((last - first + _seen(first, window)).sum())
