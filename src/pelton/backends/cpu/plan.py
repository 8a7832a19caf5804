"""A model as data: the steps that its function writes down when it is called once with a `Recorder`.

Nothing here computes. The number of tokens `T` and of logit rows `R` stay symbols, so that one recording serves
every mix of decode and chunked prefill.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pelton.errors import InternalError, UnsupportedModel
from pelton.ops.spec import Activation, AttendSpec, BatchRefs, Dim, R, RopeSpec, Rule, T, TensorRef, rows_of

IDS = TensorRef("ids", (T,))
POSITIONS = TensorRef("positions", (T,))
LOGIT_ROWS = TensorRef("logit_rows", (R,))
INPUTS = (IDS, POSITIONS, LOGIT_ROWS)

_LAYER = re.compile(r"^(.*?\blayers\.\d+)\.")


@dataclass(frozen=True)
class PlanKey:
    """Whatever shapes a plan; everything else is an input, bound per step."""

    entry: str
    isa: str
    kv_type: str
    max_tokens: int
    max_rows: int


@dataclass(frozen=True)
class Step:
    """One op: `ins` in the order of its signature in `ops.spec` (None: an optional operand not given).

    Where `layer` changes from one step to the next there is a cut: weights may be streamed and work handed to
    another stage there.
    """

    op: str
    outs: tuple[TensorRef, ...]
    ins: tuple[TensorRef | None, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    layer: str = ""

    @property
    def operands(self) -> Iterator[TensorRef]:
        """The operands that are there."""
        return (ref for ref in self.ins if ref is not None)


@dataclass(frozen=True)
class Plan:
    """Steps in the order in which they were written down.

    `weights` is the table of weights, in order of first use: a weight's id is its place.
    """

    steps: tuple[Step, ...]
    weights: tuple[str, ...]
    result: TensorRef | None

    def dump(self) -> str:
        """The plan as text, one step a line."""
        lines: list[str] = []
        layer = ""
        for step in self.steps:
            if step.layer != layer:
                layer = step.layer
                lines.append(f"-- {layer}")
            lines.append(format_step(step))
        return "\n".join(lines) + "\n"


def format_step(step: Step) -> str:
    """`t3 [T,64] = rms_norm(t2, layers.0.attn_norm, eps=1e-05)`."""
    outs = ", ".join(f"{out.name} [{','.join(map(str, out.shape))}]" for out in step.outs) or "-"
    operands = ["-" if ref is None else ref.name for ref in step.ins]
    operands += [f"{name}={_format_attr(value)}" for name, value in step.attrs.items() if value is not None]
    return f"{outs} = {step.op}({', '.join(operands)})"


def _format_attr(value: Any) -> str:
    if isinstance(value, RopeSpec):
        ends = f"{value.inv_freq[0]:.6g}..{value.inv_freq[-1]:.6g}"
        return f"rope(dim={value.dim}, freq={ends}, scale={value.scale:g})"
    if isinstance(value, AttendSpec):
        heads = f"{value.num_heads}/{value.num_kv_heads}x{value.head_dim}"
        window = "" if value.window is None else f", window={value.window}"
        cap = "" if value.softcap is None else f", softcap={value.softcap:g}"
        return f"{value.mask}(group={value.group}.{value.slot}, heads={heads}, scale={value.scale:g}{window}{cap})"
    return f"{value:g}" if isinstance(value, float) else str(value)


class WeightRefs(Mapping[str, TensorRef]):
    """What a model sees as `weights`: references by name. A weight that is asked for and is not there is the
    model file's fault, and says so."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._refs = {name: TensorRef(name, shape) for name, shape in shapes.items()}

    def __getitem__(self, name: str) -> TensorRef:
        try:
            return self._refs[name]
        except KeyError:
            raise UnsupportedModel(f"the model needs a weight {name!r} that the file does not have") from None

    def __contains__(self, name: object) -> bool:
        return name in self._refs

    def __iter__(self) -> Iterator[str]:
        return iter(self._refs)

    def __len__(self) -> int:
        return len(self._refs)


# ruff: noqa: D102 (the methods of Recorder are those of Ops, where they are described)
class Recorder:
    """An `Ops[TensorRef]` that writes down instead of computing. Shape rules are those of `ops.spec`."""

    def __init__(self, weights: Iterable[str]) -> None:
        self._known = set(weights)
        self._used: dict[str, None] = {}
        self._steps: list[Step] = []
        self._layer = "start"
        self._num_tensors = 0

    @property
    def batch(self) -> BatchRefs:
        """The inputs of a step, to hand to the model's function."""
        return BatchRefs(ids=IDS, positions=POSITIONS, logit_rows=LOGIT_ROWS)

    def finish(self, result: TensorRef | None) -> Plan:
        """The plan written so far; `result` is what the model's function returned."""
        return Plan(tuple(self._steps), tuple(self._used), result)

    def _write(
        self, op: str, shapes: tuple[tuple[Dim, ...], ...], ins: tuple[TensorRef | None, ...], **attrs: Any
    ) -> tuple[TensorRef, ...]:
        for ref in ins:
            if ref is not None and ref.name in self._known:
                self._used.setdefault(ref.name)
                self._mark(ref.name)
        outs = tuple(TensorRef(f"t{self._num_tensors + i}", shape) for i, shape in enumerate(shapes))
        self._num_tensors += len(outs)
        self._steps.append(Step(op, outs, ins, attrs, self._layer))
        return outs

    def _mark(self, weight: str) -> None:
        """The first weight of another layer is where that layer begins."""
        if layer := _LAYER.match(weight):
            self._layer = layer[1]
        elif self._layer != "start":
            self._layer = "end"

    def _one(self, op: str, shape: tuple[Dim, ...], *ins: TensorRef | None, **attrs: Any) -> TensorRef:
        return self._write(op, (shape,), ins, **attrs)[0]

    def embed(self, table: TensorRef, ids: TensorRef) -> TensorRef:
        return self._one("embed", (rows_of(ids), table.shape[1]), table, ids)

    def linear(self, x: TensorRef, weight: TensorRef, bias: TensorRef | None = None) -> TensorRef:
        _need(x.shape[-1] == weight.shape[1], "linear", x, weight)
        return self._one("linear", (rows_of(x), weight.shape[0]), x, weight, bias)

    def expert_linear(self, x: TensorRef, experts: TensorRef, ids: TensorRef) -> TensorRef:
        width = width_of(ids.shape[1]) * width_of(experts.shape[1])
        return self._one("expert_linear", (rows_of(x), width), x, experts, ids)

    def head_linear(self, x: TensorRef, weights: TensorRef) -> TensorRef:
        heads, width, inner = map(width_of, weights.shape)
        _need(x.shape[-1] == heads * inner, "head_linear", x, weights)
        return self._one("head_linear", (rows_of(x), heads * width), x, weights)

    def route(
        self, scores: TensorRef, *, num_chosen: int, normalize: bool, scoring: Literal["softmax", "sigmoid"]
    ) -> tuple[TensorRef, TensorRef]:
        shape = (rows_of(scores), num_chosen)
        ids, weights = self._write(
            "route", (shape, shape), (scores,), num_chosen=num_chosen, normalize=normalize, scoring=scoring
        )
        return ids, weights

    def combine(self, x: TensorRef, weights: TensorRef) -> TensorRef:
        return self._one("combine", (rows_of(x), width_of(x.shape[1]) // width_of(weights.shape[1])), x, weights)

    def rms_norm(self, x: TensorRef, weight: TensorRef | None, *, eps: float, num_groups: int = 1) -> TensorRef:
        if weight is not None:
            _need(x.shape[-1] == num_groups * width_of(weight.shape[0]), "rms_norm", x, weight)
        return self._one("rms_norm", x.shape, x, weight, eps=eps, num_groups=num_groups)

    def layer_norm(self, x: TensorRef, weight: TensorRef, bias: TensorRef | None, *, eps: float) -> TensorRef:
        _need(x.shape[-1:] == weight.shape, "layer_norm", x, weight)
        return self._one("layer_norm", x.shape, x, weight, bias, eps=eps)

    def rope(self, x: TensorRef, positions: TensorRef, *, num_heads: int, spec: RopeSpec) -> TensorRef:
        return self._one("rope", x.shape, x, positions, num_heads=num_heads, spec=spec)

    def attend(self, q: TensorRef, k: TensorRef | None, v: TensorRef | None, *, spec: AttendSpec) -> TensorRef:
        if q.shape[-1] != spec.num_heads * spec.head_dim:
            raise UnsupportedModel(f"attend: {q.name} {q.shape} is not {spec.num_heads} heads of {spec.head_dim}")
        return self._one("attend", (rows_of(q), spec.num_heads * spec.value_dim), q, k, v, spec=spec)

    def remember(self, k: TensorRef, v: TensorRef, *, spec: AttendSpec) -> None:
        self._write("remember", (), (k, v), spec=spec)

    def recur(
        self, x: TensorRef, params: dict[str, TensorRef], *, rule: Rule, layer: int, group: int, slot: int
    ) -> TensorRef:
        attrs = {"rule": rule, "layer": layer, "group": group, "slot": slot, "params": tuple(params)}
        return self._one("recur", x.shape, x, *params.values(), **attrs)

    def add(self, x: TensorRef, y: TensorRef) -> TensorRef:
        _need(y.shape in (x.shape, x.shape[-1:]), "add", x, y)
        return self._one("add", x.shape, x, y)

    def mul(self, x: TensorRef, y: TensorRef) -> TensorRef:
        _need(y.shape in (x.shape, x.shape[-1:], (rows_of(x), 1)), "mul", x, y)
        return self._one("mul", x.shape, x, y)

    def scale(self, x: TensorRef, factor: float) -> TensorRef:
        return self._one("scale", x.shape, x, factor=factor)

    def act(self, x: TensorRef, kind: Activation) -> TensorRef:
        return self._one("act", x.shape, x, kind=kind)

    def glu(self, gate: TensorRef, up: TensorRef, kind: Activation) -> TensorRef:
        _need(gate.shape == up.shape, "glu", gate, up)
        return self._one("glu", gate.shape, gate, up, kind=kind)

    def softcap(self, x: TensorRef, cap: float) -> TensorRef:
        return self._one("softcap", x.shape, x, cap=cap)

    def split(self, x: TensorRef, widths: tuple[int, ...]) -> tuple[TensorRef, ...]:
        if sum(widths) != x.shape[-1]:
            raise UnsupportedModel(f"split: {widths} do not sum to the width of {x.name} {x.shape}")
        return self._write("split", tuple((rows_of(x), width) for width in widths), (x,))

    def concat(self, parts: tuple[TensorRef, ...], *, groups: int = 1) -> TensorRef:
        width = sum(width_of(part.shape[1]) for part in parts)
        return self._one("concat", (rows_of(parts[0]), width), *parts, groups=groups)

    def regroup(self, x: TensorRef, *, groups: int, take: tuple[int, int]) -> TensorRef:
        return self._one("regroup", (rows_of(x), groups * (take[1] - take[0])), x, groups=groups, take=take)

    def repeat(self, x: TensorRef, times: int) -> TensorRef:
        return self._one("repeat", (rows_of(x), times * width_of(x.shape[1])), x, times=times)

    def take(self, x: TensorRef, rows: TensorRef) -> TensorRef:
        return self._one("take", (rows_of(rows), x.shape[1]), x, rows)

    def logits(
        self,
        x: TensorRef,
        weight: TensorRef,
        *,
        num_valid: int,
        bias: TensorRef | None = None,
        softcap: float | None = None,
    ) -> TensorRef:
        _need(x.shape[-1] == weight.shape[1], "logits", x, weight)
        return self._one("logits", (rows_of(x), num_valid), x, weight, bias, num_valid=num_valid, softcap=softcap)


def width_of(dim: Dim) -> int:
    """A dimension that must be a number."""
    if isinstance(dim, int):
        return dim
    raise UnsupportedModel(f"a width must be a number, not {dim!r}")


def present(ref: TensorRef | None) -> TensorRef:
    """An operand that its op always has."""
    if ref is None:
        raise InternalError("an operand is missing")
    return ref


def _need(holds: bool, op: str, x: TensorRef, y: TensorRef) -> None:
    if not holds:
        raise UnsupportedModel(f"{op}: {x.name} {x.shape} and {y.name} {y.shape} do not fit together")
