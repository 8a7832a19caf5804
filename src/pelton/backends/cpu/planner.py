"""From a plan as written to one that runs well: pure passes, each a function from steps to steps.

    fuse      bias, residual add, activation and gate/up become the epilogue of their linear
    prepare   activations are rounded to a kernel family's form once, for all linears that read them
    angles    cos and sin of the positions are computed once per step for all layers that rotate alike
    schedule  steps that can run side by side become one phase: one hand-out of work to the threads
    place     intermediates share one arena by lifetime

A phase of row steps runs block of rows by block of rows through all its steps; a phase of linears spreads the
tiles of all its weights over the threads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from pelton.backends.cpu.plan import Plan, PlanKey, Step, format_step, present, width_of
from pelton.errors import InternalError
from pelton.ops.spec import Dim, R, T, TensorRef, rows_of

LINEARS = frozenset({"linear", "linear_add", "linear_act", "linear_glu"})
ALIGN = 64
"""Bytes: rows and buffers start at multiples of it."""

HEAD_ROWS = 32
"""Rows whose logits exist at the same time."""
HEAD_X, HEAD_LOGITS = "head.x", "head.logits"
"""Names of the head's buffers: one tile's prepared activations and logits."""

PhaseKind = Literal["rows", "linear", "alone"]
ALONE = frozenset({"attend", "remember", "recur", "expert_linear", "head_linear"})
_WRITES_CACHE = frozenset({"attend", "remember", "recur"})


@dataclass(frozen=True)
class Phase:
    """Steps between two barriers."""

    kind: PhaseKind
    rows: Dim
    layer: str
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in the arena. `stride`: floats from row to row; 0 for a prepared form, which has no rows."""

    offset: int
    bytes: int
    stride: int


@dataclass(frozen=True)
class Program:
    """A plan ready to be handed to the core. `head` is the `logits` step, put off until sampling."""

    key: PlanKey
    phases: tuple[Phase, ...]
    places: Mapping[str, Place]
    arena_bytes: int
    weights: tuple[str, ...]
    head: Step | None
    result: TensorRef | None

    def dump(self) -> str:
        """The program as text: phases at the left margin, their steps below, `@` the place in the arena."""
        key = self.key
        lines = [
            f"{key.entry}: {key.isa}, kv {key.kv_type}, at most {key.max_tokens} tokens and {key.max_rows} logit "
            f"rows; {len(self.phases)} phases, arena {self.arena_bytes} bytes"
        ]
        layer = ""
        for i, phase in enumerate(self.phases):
            if phase.layer != layer:
                layer = phase.layer
                lines.append(f"-- {layer}")
            lines.append(f"{i:3} {phase.kind} {phase.rows}")
            for step in phase.steps:
                places = " ".join(f"@{self.places[out.name].offset}" for out in step.outs)
                lines.append(f"    {places:>8} {format_step(step)}")
        if self.head is not None:
            lines.append(f"    deferred {format_step(self.head)}")
        return "\n".join(lines) + "\n"


def plan_program(
    plan: Plan, key: PlanKey, families: Mapping[str, str], prepared_bytes: Callable[[str, int, int], int]
) -> Program:
    """All passes in order.

    `families` names the kernel family of every 2-D weight; `prepared_bytes(family, rows, width)` is the size of a
    prepared form.
    """
    head = next((step for step in plan.steps if step.op == "logits"), None)
    steps = [step for step in plan.steps if step is not head]
    kept = {ref.name for ref in (plan.result, head.ins[0] if head else None) if ref is not None}
    if head is not None:
        head = replace(head, attrs={**head.attrs, "family": families[present(head.ins[1]).name]})
    phases = schedule(angles(prepare(fuse(steps, kept), families)))
    places, arena = place(phases, head, kept, key, prepared_bytes)
    return Program(key, phases, places, arena, plan.weights, head, plan.result)


def fuse(steps: Iterable[Step], kept: set[str]) -> list[Step]:
    """Let a linear do what follows it, where nobody else sees its plain result (`kept`: seen from outside)."""
    steps = list(steps)
    uses = Counter(ref.name for step in steps for ref in step.operands)
    private = {
        out.name: step
        for step in steps
        if step.op == "linear"
        for out in step.outs
        if uses[out.name] == 1 and out.name not in kept
    }
    absorbed: set[int] = set()
    fused: list[Step] = []
    for step in steps:
        new, linears = _fuse_one(step, [private.get(ref.name) for ref in step.operands])
        absorbed.update(map(id, linears))
        fused.append(new)
    return [step for step in fused if id(step) not in absorbed]


def _fuse_one(step: Step, linears: list[Step | None]) -> tuple[Step, list[Step]]:
    """`step` as the epilogue of linears that made its operands, and these; `step` itself where that is impossible."""
    match step.op, linears:
        case "add", [_, Step() as linear] if step.ins[1] == linear.outs[0] and _same_shape(step):
            return replace(step, op="linear_add", ins=(*linear.ins, step.ins[0])), [linear]
        case "add", [Step() as linear, _] if _same_shape(step):
            return replace(step, op="linear_add", ins=(*linear.ins, step.ins[1])), [linear]
        case "act", [Step() as linear]:
            return replace(step, op="linear_act", ins=linear.ins), [linear]
        case "glu", [Step() as gate, Step() as up] if gate.ins[0] == up.ins[0]:
            return replace(step, op="linear_glu", ins=(*gate.ins, *up.ins)), [gate, up]
    return step, []


def _same_shape(step: Step) -> bool:
    x, y = step.operands
    return x.shape == y.shape


def prepare(steps: Iterable[Step], families: Mapping[str, str]) -> list[Step]:
    """Write down the rounding of activations: once for each tensor and family, whoever reads it."""
    made: dict[tuple[str, str], TensorRef] = {}
    out: list[Step] = []
    for step in steps:
        if step.op not in LINEARS:
            out.append(step)
            continue
        ins = list(step.ins)
        for i in (0, 3) if step.op == "linear_glu" else (0,):
            x, weight = present(ins[i]), present(ins[i + 1])
            family = families[weight.name]
            if (x.name, family) not in made:
                made[x.name, family] = TensorRef(f"{x.name}.{family}", x.shape)
                out.append(Step("prepare", (made[x.name, family],), (x,), {"family": family}, step.layer))
            ins[i] = made[x.name, family]
        out.append(replace(step, ins=tuple(ins)))
    return out


def angles(steps: Iterable[Step]) -> list[Step]:
    """Write down cos and sin once for all `rope` steps with the same positions and frequencies."""
    made: dict[tuple[str, object], TensorRef] = {}
    out: list[Step] = []
    for step in steps:
        if step.op != "rope":
            out.append(step)
            continue
        x, positions = step.operands
        spec = step.attrs["spec"]
        if (positions.name, spec) not in made:
            table = TensorRef(f"angles{len(made)}", (rows_of(positions), spec.dim))
            made[positions.name, spec] = table
            out.append(Step("angles", (table,), (positions,), {"spec": spec}, step.layer))
        attrs = {"num_heads": step.attrs["num_heads"], "dim": spec.dim}
        out.append(replace(step, ins=(x, made[positions.name, spec]), attrs=attrs))
    return out


def schedule(steps: Iterable[Step]) -> tuple[Phase, ...]:
    """Group steps into phases, never across a cut. Within a layer: all row steps that can run, then all linears
    that can run, then one of the rest; steps that write the cache keep their order."""
    phases: list[Phase] = []
    stretch: list[Step] = []
    for step in steps:
        if stretch and stretch[-1].layer != step.layer:
            phases += _schedule_layer(stretch)
            stretch = []
        stretch.append(step)
    return tuple(phases + _schedule_layer(stretch)) if stretch else tuple(phases)


def _schedule_layer(steps: list[Step]) -> list[Phase]:
    made_here = {out.name: i for i, step in enumerate(steps) for out in step.outs}
    needs = [{made_here[ref.name] for ref in step.operands if ref.name in made_here} for step in steps]
    writers = [i for i, step in enumerate(steps) if step.op in _WRITES_CACHE]
    for earlier, later in pairwise(writers):
        needs[later].add(earlier)
    waiting = list(range(len(steps)))
    done: set[int] = set()
    phases: list[Phase] = []
    while waiting:
        first = min((i for i in waiting if needs[i] <= done), key=lambda i: (_rank(steps[i]), i), default=None)
        if first is None:
            raise InternalError(f"the steps of {steps[0].layer} wait for each other")
        kind, rows = _kind(steps[first]), _rows(steps[first])
        chosen = [first]
        if kind != "alone":
            reach = set(done)
            chosen = []
            for i in waiting:
                if _kind(steps[i]) == kind and _rows(steps[i]) == rows and needs[i] <= reach:
                    chosen.append(i)
                    if kind == "rows":  # a row step may follow another in the same phase, row by row
                        reach.add(i)
        done.update(chosen)
        waiting = [i for i in waiting if i not in done]
        phases.append(Phase(kind, rows, steps[first].layer, tuple(steps[i] for i in chosen)))
    return phases


def _kind(step: Step) -> PhaseKind:
    return "linear" if step.op in LINEARS else "alone" if step.op in ALONE else "rows"


def _rank(step: Step) -> int:
    return ("rows", "linear", "alone").index(_kind(step))


def _rows(step: Step) -> Dim:
    return rows_of(step.outs[0]) if step.outs else T


def stride_of(width: int) -> int:
    """Floats from row to row: whole tiles of 16, and never a multiple of 4 KB, which would put all rows into the
    same few cache sets."""
    stride = -(-width // 16) * 16
    return stride + 16 if stride % 1024 == 0 else stride


def place(
    phases: tuple[Phase, ...],
    head: Step | None,
    kept: set[str],
    key: PlanKey,
    prepared_bytes: Callable[[str, int, int], int],
) -> tuple[dict[str, Place], int]:
    """Give every tensor a place; tensors that live at the same time never overlap. Returns the places and the size
    of the arena. The head's buffers live after the last phase."""
    last_use = last_uses(phases, kept)
    places: dict[str, Place] = {}

    def put(index: int, sizes: Mapping[str, tuple[int, int]]) -> None:
        live = [spot for name, spot in places.items() if last_use[name] >= index]
        for name, (size, stride) in sorted(sizes.items(), key=lambda item: -item[1][0]):
            places[name] = Place(_first_gap(live, size), size, stride)
            live.append(places[name])

    for index, phase in enumerate(phases):
        outs = ((step, out) for step in phase.steps for out in step.outs)
        put(index, {out.name: _size(step, out, key, prepared_bytes) for step, out in outs})
    if head is not None:
        put(len(phases), _head_sizes(head, prepared_bytes))
    return places, max((spot.offset + spot.bytes for spot in places.values()), default=0)


def _head_sizes(head: Step, prepared_bytes: Callable[[str, int, int], int]) -> dict[str, tuple[int, int]]:
    rows, width = present(head.ins[1]).shape
    stride = stride_of(width_of(rows))
    return {
        HEAD_X: (_align(prepared_bytes(head.attrs["family"], HEAD_ROWS, width_of(width))), 0),
        HEAD_LOGITS: (HEAD_ROWS * stride * 4, stride),
    }


def last_uses(phases: tuple[Phase, ...], kept: set[str]) -> dict[str, int]:
    """The last phase that reads (or, if none does, writes) each tensor; `kept` ones live to the end."""
    last: dict[str, int] = {}
    for index, phase in enumerate(phases):
        for step in phase.steps:
            last.update({ref.name: index for ref in (*step.outs, *step.operands)})
    return last | dict.fromkeys(kept, len(phases))


def _size(step: Step, out: TensorRef, key: PlanKey, prepared_bytes: Callable[[str, int, int], int]) -> tuple[int, int]:
    rows = key.max_rows if rows_of(out) == R else key.max_tokens
    width = width_of(out.shape[1])
    if step.op == "prepare":
        return _align(prepared_bytes(step.attrs["family"], rows, width)), 0
    stride = stride_of(width)
    return _align(rows * stride * 4), stride


def _align(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def _first_gap(live: Iterable[Place], size: int) -> int:
    start = 0
    for spot in sorted(live, key=lambda spot: spot.offset):
        if spot.offset - start >= size:
            break
        start = max(start, spot.offset + spot.bytes)
    return start
