"""Records a model as a plan, and replays a plan on the reference: what was written down must be the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pelton.backends.cpu.plan import Plan, PlanKey, Recorder, Step, WeightRefs
from pelton.backends.cpu.planner import Program, plan_program
from pelton.ops import reference
from pelton.ops.data import Batch, Weight


def record(entry: Callable[[Any, Mapping[str, Any], Any], Any], weights: Mapping[str, Weight]) -> Plan:
    """`entry`: (ops, weights, batch) -> result, the config bound."""
    shapes = {name: weight.shape for name, weight in weights.items()}
    recorder = Recorder(shapes)
    return recorder.finish(entry(recorder, WeightRefs(shapes), recorder.batch))


def lay_out(plan: Plan, weights: Mapping[str, Weight]) -> Program:
    """The plan through all of the planner's passes."""
    families = {name: "f32" for name in plan.weights if len(weights[name].shape) == 2}
    return plan_program(
        plan, PlanKey("step", "avx2", "f32", 256, 256), families, lambda family, rows, width: 4 * rows * width
    )


def _call(ops: reference.Ops, step: Step, ins: list[Any]) -> Any:
    attrs = dict(step.attrs)
    match step.op:
        case "split":
            return ops.split(ins[0], tuple(int(out.shape[1]) for out in step.outs))
        case "concat":
            return ops.concat(tuple(ins), **attrs)
        case "recur":
            names = attrs.pop("params")
            return ops.recur(ins[0], dict(zip(names, ins[1:], strict=True)), **attrs)
        case "logits":
            return ops.logits(ins[0], ins[1], bias=ins[2], **attrs)
    return getattr(ops, step.op)(*ins, **attrs)


def replay(plan: Plan, ops: reference.Ops, weights: Mapping[str, Any], batch: Batch) -> Any:
    """The plan's result, step by step."""
    values: dict[str, Any] = dict(weights)
    values |= {"ids": batch.ids, "positions": batch.positions, "logit_rows": batch.logit_rows}
    for step in plan.steps:
        result = _call(ops, step, [None if ref is None else values[ref.name] for ref in step.ins])
        results = result if isinstance(result, tuple) else (result,)
        for out, value in zip(step.outs, results, strict=False):
            assert value.shape[1:] == out.shape[1:], f"{step.op} gives {value.shape}, the plan says {out.shape}"
            values[out.name] = value
    return None if plan.result is None else values[plan.result.name]
