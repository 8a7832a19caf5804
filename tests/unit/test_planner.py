"""Recording and planning, without a compiled core: golden dumps of real families, and laws of the passes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pelton.backends.cpu.plan import Plan, PlanKey, Recorder, WeightRefs
from pelton.backends.cpu.planner import HEAD_LOGITS, HEAD_X, Program, last_uses, plan_program, stride_of
from pelton.errors import UnsupportedModel
from pelton.ops.spec import AttendSpec, RopeSpec

GOLDEN = Path(__file__).parent / "golden"
KEY = PlanKey("step", "test", "f16", max_tokens=64, max_rows=8)


def prepared_bytes(family: str, rows: int, width: int) -> int:
    return rows * width * {"f32": 4, "bf16": 2, "int8": 1}[family] + rows * 8


def record(shapes, function) -> Plan:
    recorder = Recorder(shapes)
    return recorder.finish(function(recorder, WeightRefs(shapes), recorder.batch))


def planned(plan: Plan, shapes, family="int8", **families: str) -> Program:
    matrices = {name: family for name, shape in shapes.items() if len(shape) == 2} | families
    return plan_program(plan, KEY, matrices, prepared_bytes)


ROPE = RopeSpec(8, (1.0, 0.1, 0.01, 0.001))


def llama_shapes(layers: int = 2, bias: bool = False, norms: bool = False):
    shapes = {"embed": (100, 32), "norm": (32,)}
    for i in range(layers):
        p = f"layers.{i}."
        shapes |= {p + "attn_norm": (32,), p + "mlp_norm": (32,)}
        shapes |= {p + "q": (32, 32), p + "k": (16, 32), p + "v": (16, 32), p + "o": (32, 32)}
        shapes |= {p + "gate": (80, 32), p + "up": (80, 32), p + "down": (32, 80)}
        if bias:
            shapes |= {p + "q_bias": (32,), p + "k_bias": (16,), p + "v_bias": (16,)}
        if norms:
            shapes |= {p + "q_norm": (8,), p + "k_norm": (8,), p + "attn_post_norm": (32,)}
    return shapes


def llama(layers: int = 2, bias: bool = False, norms: bool = False):
    """The shape of a decoder; `norms`: with norms of heads and after attention, as Gemma 3 has."""

    def step(ops, w, batch):
        x = ops.embed(w["embed"], batch.ids)
        for i in range(layers):
            p = f"layers.{i}."
            spec = AttendSpec(i, 0, i, 4, 2, 8, 8, 8**-0.5)
            h = ops.rms_norm(x, w[p + "attn_norm"], eps=1e-5)
            q, k, v = (ops.linear(h, w[p + n], w[p + n + "_bias"] if bias else None) for n in "qkv")
            if norms:
                q = ops.rms_norm(q, w[p + "q_norm"], eps=1e-6, num_groups=4)
                k = ops.rms_norm(k, w[p + "k_norm"], eps=1e-6, num_groups=2)
            q = ops.rope(q, batch.positions, num_heads=4, spec=ROPE)
            k = ops.rope(k, batch.positions, num_heads=2, spec=ROPE)
            a = ops.linear(ops.attend(q, k, v, spec=spec), w[p + "o"])
            x = ops.add(x, ops.rms_norm(a, w[p + "attn_post_norm"], eps=1e-6) if norms else a)
            h = ops.rms_norm(x, w[p + "mlp_norm"], eps=1e-5)
            h = ops.glu(ops.linear(h, w[p + "gate"]), ops.linear(h, w[p + "up"]), "silu")
            x = ops.add(x, ops.linear(h, w[p + "down"]))
        h = ops.rms_norm(ops.take(x, batch.logit_rows), w["norm"], eps=1e-5)
        return ops.logits(h, w["embed"], num_valid=97)

    return step


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3"])
def test_golden_dump(name):
    options = {"llama": {}, "qwen2": {"bias": True}, "gemma3": {"norms": True}}[name]
    shapes = llama_shapes(**options)
    plan = record(shapes, llama(**options))
    text = plan.dump() + "\n" + planned(plan, shapes).dump()
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("PELTON_WRITE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text(), "the plan has changed; if that is right, run with PELTON_WRITE_GOLDEN=1"


def ops_of(program: Program) -> list[list[str]]:
    return [[step.op for step in phase.steps] for phase in program.phases]


def test_a_llama_layer_has_four_spread_phases():
    shapes = llama_shapes(layers=1)
    program = planned(record(shapes, llama(layers=1)), shapes)
    assert ops_of(program) == [
        ["embed"],
        ["rms_norm", "prepare", "angles"],
        ["linear", "linear", "linear"],
        ["rope", "rope"],
        ["attend"],
        ["prepare"],
        ["linear_add"],
        ["rms_norm", "prepare"],
        ["linear_glu"],
        ["prepare"],
        ["linear_add"],
        ["take"],
        ["rms_norm"],
    ]
    assert program.head is not None
    assert program.head.attrs["num_valid"] == 97


def test_activations_are_prepared_once_per_family():
    shapes = llama_shapes(layers=1)
    program = planned(record(shapes, llama(layers=1)), shapes, **{"layers.0.k": "f32", "layers.0.up": "f32"})
    prepared = [
        out.name for phase in program.phases for step in phase.steps for out in step.outs if step.op == "prepare"
    ]
    assert len(prepared) == len(set(prepared)) == 6  # two forms of both norms' results, one each for o and down
    (glu,) = (step for phase in program.phases for step in phase.steps if step.op == "linear_glu")
    assert [ref and ref.name.split(".")[1] for ref in (glu.ins[0], glu.ins[3])] == ["int8", "f32"]


def test_a_result_that_others_read_is_not_fused_away():
    shapes = {"a": (16, 16), "b": (16, 16)}

    def step(ops, w, batch):
        x = ops.concat((ops.embed(w["a"], batch.ids),))
        y = ops.linear(x, w["a"])
        z = ops.add(ops.add(x, y), ops.linear(y, w["b"]))
        return ops.act(z, "relu")

    ops = [op for ops in ops_of(planned(record(shapes, step), shapes)) for op in ops]
    assert ops == ["embed", "concat", "prepare", "linear", "add", "prepare", "linear_add", "act"]


def test_the_sum_of_two_linears_keeps_both():
    shapes = {"a": (16, 16), "b": (16, 16)}

    def step(ops, w, batch):
        x = ops.embed(w["a"], batch.ids)
        return ops.add(ops.linear(x, w["a"]), ops.linear(x, w["b"]))

    program = planned(record(shapes, step), shapes)
    assert ops_of(program) == [["embed", "prepare"], ["linear"], ["linear_add"]]
    (add,) = program.phases[-1].steps
    assert [ref and ref.name for ref in add.ins] == ["t0.int8", "b", None, "t1"]


def test_the_result_of_a_plan_without_head_is_kept():
    shapes = {"a": (16, 16), "b": (16, 16)}
    program = planned(record(shapes, lambda ops, w, batch: ops.linear(ops.embed(w["a"], batch.ids), w["b"])), shapes)
    assert program.head is None
    assert program.result is not None
    assert last_uses(program.phases, {program.result.name})[program.result.name] == len(program.phases)


def test_a_missing_weight_is_named():
    with pytest.raises(UnsupportedModel, match=r"'layers\.0\.q'"):
        record({"embed": (4, 4)}, lambda ops, w, batch: ops.linear(ops.embed(w["embed"], batch.ids), w["layers.0.q"]))


def test_operands_that_do_not_fit_are_refused():
    shapes = {"a": (16, 16), "b": (16, 32), "n": (8,)}
    for wrong in (
        lambda ops, x, w: ops.linear(x, w["b"]),
        lambda ops, x, w: ops.rms_norm(x, w["n"], eps=1e-5),
        lambda ops, x, w: ops.add(x, w["n"]),
        lambda ops, x, w: ops.split(x, (8, 9)),
    ):
        with pytest.raises(UnsupportedModel):
            record(shapes, lambda ops, w, batch, wrong=wrong: wrong(ops, ops.embed(w["a"], batch.ids), w))


def test_every_op_can_be_written_down():
    shapes = {
        "embed": (10, 16), "v": (16,), "experts": (4, 6, 16), "heads": (2, 4, 8), "router": (4, 16),
        "conv": (16, 4), "out": (16, 24),
    }  # fmt: skip

    def step(ops, w, batch):
        x = ops.layer_norm(ops.embed(w["embed"], batch.ids), w["v"], w["v"], eps=1e-5)
        ids, weights = ops.route(ops.linear(x, w["router"]), num_chosen=2, normalize=True, scoring="softmax")
        y = ops.combine(ops.expert_linear(x, w["experts"], ids), weights)
        z = ops.repeat(ops.regroup(x, groups=2, take=(0, 4)), 2)
        z = ops.recur(ops.mul(z, w["v"]), {"weight": w["conv"]}, rule="conv", layer=0, group=0, slot=0)
        k, v = ops.split(ops.head_linear(z, w["heads"]), (4, 4))
        ops.remember(k, v, spec=AttendSpec(0, 1, 0, 2, 1, 4, 4, 1.0, mask="cross"))
        a = ops.attend(
            ops.concat((k, v), groups=1), None, None, spec=AttendSpec(0, 1, 0, 2, 1, 4, 4, 1.0, mask="cross")
        )
        z = ops.linear(ops.concat((z, a)), w["out"])
        z = ops.softcap(ops.scale(ops.act(z, "gelu"), 0.5), 30.0)
        return ops.logits(ops.take(z, batch.logit_rows), w["embed"], num_valid=10, softcap=2.0), y

    recorder = Recorder(shapes)
    result, y = step(recorder, WeightRefs(shapes), recorder.batch)
    plan = recorder.finish(result)
    assert y.shape == ("T", 6)
    text = plan.dump() + planned(plan, shapes).dump()
    for op in ("layer_norm", "route", "combine", "expert_linear", "head_linear", "recur", "remember", "regroup"):
        assert f"= {op}(" in text


def check_no_overlap(program: Program, kept: set[str]) -> None:
    last = last_uses(program.phases, kept)
    first = {out.name: i for i, phase in enumerate(program.phases) for step in phase.steps for out in step.outs}
    if program.head is not None:
        end = len(program.phases)
        first |= {HEAD_X: end, HEAD_LOGITS: end}
        last |= {HEAD_X: end, HEAD_LOGITS: end}
    names = list(program.places)
    for i, a in enumerate(names):
        place = program.places[a]
        assert place.offset % 64 == 0
        assert place.offset + place.bytes <= program.arena_bytes
        for b in names[:i]:
            other = program.places[b]
            together = first[a] <= last[b] and first[b] <= last[a]
            apart = place.offset + place.bytes <= other.offset or other.offset + other.bytes <= place.offset
            assert not together or apart, (a, b)


@st.composite
def programs(draw):
    """Random plans: each step takes any earlier tensors of a fitting width."""
    shapes = {"embed": (50, 16)}
    for i in range(6):
        shapes |= {f"layers.{i}.w": (16, 16), f"layers.{i}.v": (16,)}
    num_steps = draw(st.integers(1, 25))
    choices = [(draw(st.integers(0, 6)), draw(st.integers(0, 99)), draw(st.integers(0, 99))) for _ in range(num_steps)]

    def step(ops, w, batch):
        live = [ops.embed(w["embed"], batch.ids)]
        for i, (op, a, b) in enumerate(choices):
            x, y = live[a % len(live)], live[b % len(live)]
            layer = f"layers.{i * 6 // num_steps}."
            match op:
                case 0 | 1:
                    live.append(ops.linear(x, w[layer + "w"], w[layer + "v"] if op else None))
                case 2:
                    live.append(ops.add(x, y))
                case 3:
                    live.append(ops.glu(*(ops.linear(x, w[layer + "w"]) for _ in range(2)), "silu"))
                case 4:
                    live.append(ops.rope(x, batch.positions, num_heads=2, spec=ROPE))
                case 5:
                    live.append(ops.attend(x, x, y, spec=AttendSpec(i, 0, i, 2, 2, 8, 8, 1.0)))
                case 6:
                    live += ops.split(ops.concat((x, y)), (16, 16))
        last = ops.take(live[-1], batch.logit_rows)
        return ops.logits(last, w["embed"], num_valid=50) if choices[0][1] % 2 else last

    return shapes, record(shapes, step)


@settings(max_examples=50)
@given(programs())
def test_tensors_that_live_together_never_overlap(case):
    shapes, plan = case
    program = planned(plan, shapes)
    kept = {ref.name for ref in (plan.result, program.head and program.head.ins[0]) if ref is not None}
    check_no_overlap(program, kept)


@settings(max_examples=50)
@given(programs())
def test_steps_run_after_what_they_need_and_layers_stay_whole(case):
    shapes, plan = case
    program = planned(plan, shapes)
    made = {"ids", "positions", "logit_rows", *shapes}
    for phase in program.phases:
        here: set[str] = set()
        for step in phase.steps:
            assert {ref.name for ref in step.operands} <= (made | here if phase.kind == "rows" else made)
            assert step.layer == phase.layer
            here |= {out.name for out in step.outs}
        made |= here
    layers = [phase.layer for phase in program.phases]
    order = list(dict.fromkeys(step.layer for step in plan.steps))
    assert layers == sorted(layers, key=order.index)
    attends = [step for step in plan.steps if step.op == "attend"]
    done = [step for phase in program.phases for step in phase.steps if step.op == "attend"]
    assert [step.outs for step in done] == [step.outs for step in attends]


def test_strides_are_whole_tiles_and_never_a_multiple_of_a_page():
    for width in (1, 16, 17, 576, 1000, 1024, 4096, 4864, 8192):
        stride = stride_of(width)
        assert stride >= width
        assert stride % 16 == 0
        assert stride * 4 % 4096
