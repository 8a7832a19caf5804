"""Hands a planned program over to the compiled core, op by op."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, get_args

from pelton import _core
from pelton.backends.cpu.packing import FAMILIES, Layout
from pelton.backends.cpu.plan import INPUTS, Step, format_step, present, width_of
from pelton.backends.cpu.planner import HEAD_LOGITS, HEAD_ROWS, HEAD_X, Phase, Program
from pelton.errors import UnsupportedModel
from pelton.ops.data import Weight
from pelton.ops.spec import Activation, AttendSpec, R, RopeSpec, TensorRef

_ACTIVATIONS: tuple[str, ...] = get_args(Activation)
_EPILOGUES = ("linear", "linear_add", "linear_act", "linear_glu")
_ABSENT = (-1, -1, -1)


def lower(
    program: Program, weights: Mapping[str, Weight], layout: Layout, memory: _core.Memory, core: _core.Program
) -> None:
    """Build `core`, whose arena is sized for `program`; the program has passed `check`."""
    _Lowering(program, weights, layout, memory, core).run()


def check(program: Program) -> None:
    """Raises UnsupportedModel, naming the op, where the core has no kernel for one."""
    row_ops = set(_core.row_ops())
    for phase in program.phases:
        for step in phase.steps:
            match phase.kind:
                case "rows":
                    is_known = step.op in row_ops
                case "linear":
                    is_known = True
                case "alone":
                    is_known = step.op == "attend" and step.attrs["spec"].mask == "causal"
            if not is_known:
                raise UnsupportedModel(f"the CPU backend has no kernel yet for {step.op!r}: {format_step(step)}")


class _Lowering:
    def __init__(
        self,
        program: Program,
        weights: Mapping[str, Weight],
        layout: Layout,
        memory: _core.Memory,
        core: _core.Program,
    ) -> None:
        self.program = program
        self.weights = weights
        self.layout = layout
        self.memory = memory
        self.core = core
        self.ids: dict[str, int] = {}

    def run(self) -> None:
        for name in self.program.weights:
            self._add_weight(self.weights[name])
        for phase in self.program.phases:
            for step in phase.steps:
                for out in step.outs:
                    self._add_tensor(step, out)
            self._phase(phase)
        if self.program.head is not None:
            self._head(self.program.head)

    def _add_weight(self, weight: Weight) -> None:
        offset = self.layout.slots[weight.name].offset
        if len(weight.shape) == 1:
            self.ids[weight.name] = self.core.add_vector(self.memory, offset, weight.shape[0])
        else:
            rows, columns = weight.shape
            self.ids[weight.name] = self.core.add_matrix(weight.type, self.memory, offset, rows, columns)

    def _add_tensor(self, step: Step, out: TensorRef) -> None:
        place = self.program.places[out.name]
        width = width_of(out.shape[1])
        if step.op == "prepare":
            family = FAMILIES.index(step.attrs["family"])
            self.ids[out.name] = self.core.add_prepared(place.offset, width, family)
        else:
            self.ids[out.name] = self.core.add_rows(place.offset, width, place.stride)

    def _id(self, ref: TensorRef | None) -> int:
        return -1 if ref is None else self.ids[ref.name]

    def _product(self, ins: tuple[TensorRef | None, ...]) -> tuple[int, int, int]:
        x, weight, bias = ins
        return self._id(x), self._id(weight), self._id(bias)

    def _phase(self, phase: Phase) -> None:
        if phase.kind == "rows":
            self.core.begin_rows(phase.rows == R)
            for step in phase.steps:
                self._row_step(step)
        elif phase.kind == "linear":
            self.core.begin_linears(phase.rows == R)
            for step in phase.steps:
                self._linear(step)
        else:
            (step,) = phase.steps
            self._attend(step)

    def _linear(self, step: Step) -> None:
        up = self._product(step.ins[3:]) if step.op == "linear_glu" else _ABSENT
        residual = self._id(step.ins[3]) if step.op == "linear_add" else -1
        activation = _ACTIVATIONS.index(step.attrs.get("kind", "silu"))
        epilogue = _EPILOGUES.index(step.op)
        self.core.add_linear(epilogue, self._id(step.outs[0]), self._product(step.ins[:3]), up, residual, activation)

    def _row_step(self, step: Step) -> None:
        ins = [self._id(ref) for ref in step.ins if ref not in INPUTS]
        ints, floats = _NUMBERS[step.op](step.attrs) if step.op in _NUMBERS else ([], [])
        self.core.add_row_step(step.op, [self._id(out) for out in step.outs], ins, ints, floats)

    def _attend(self, step: Step) -> None:
        q, k, v = step.ins
        spec: AttendSpec = step.attrs["spec"]
        self.core.add_attend(
            q=self._id(q), k=self._id(k), v=self._id(v), out=self._id(step.outs[0]),
            group=spec.group, slot=spec.slot, num_heads=spec.num_heads, scale=spec.scale,
            window=spec.window or 0, softcap=spec.softcap or 0.0,
        )  # fmt: skip

    def _head(self, step: Step) -> None:
        x, weight, bias = step.ins
        places, width = self.program.places, self.weights[present(weight).name].shape
        family = FAMILIES.index(step.attrs["family"])
        prepared = self.core.add_prepared(places[HEAD_X].offset, width[1], family)
        logits = self.core.add_rows(places[HEAD_LOGITS].offset, width[0], places[HEAD_LOGITS].stride)
        self.core.set_head(
            x=self._id(x), product=(prepared, self._id(weight), self._id(bias)), logits=logits,
            tile_rows=HEAD_ROWS, num_valid=step.attrs["num_valid"], cap=step.attrs["softcap"] or 0.0,
        )  # fmt: skip


def _angles(attrs: Mapping[str, Any]) -> tuple[list[int], list[float]]:
    spec: RopeSpec = attrs["spec"]
    return [], [spec.scale, *spec.inv_freq]


_NUMBERS: dict[str, Callable[[Mapping[str, Any]], tuple[list[int], list[float]]]] = {
    "angles": _angles,
    "rope": lambda attrs: ([attrs["num_heads"], attrs["dim"]], []),
    "rms_norm": lambda attrs: ([attrs["num_groups"]], [attrs["eps"]]),
    "layer_norm": lambda attrs: ([], [attrs["eps"]]),
    "scale": lambda attrs: ([], [attrs["factor"]]),
    "act": lambda attrs: ([_ACTIVATIONS.index(attrs["kind"])], []),
    "glu": lambda attrs: ([_ACTIVATIONS.index(attrs["kind"])], []),
    "softcap": lambda attrs: ([], [attrs["cap"]]),
    "concat": lambda attrs: ([attrs["groups"]], []),
    "regroup": lambda attrs: ([attrs["groups"], *attrs["take"]], []),
    "repeat": lambda attrs: ([attrs["times"]], []),
}
"""The integers and the reals of each row op, in the order in which csrc/ops/rows.cpp reads them."""
