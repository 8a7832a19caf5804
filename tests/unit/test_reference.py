"""The reference's ops against values worked out by hand: what no model here would show to be wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pelton.formats.quants import WeightType
from pelton.formats.tensor import Tensor
from pelton.ops import numerics, reference
from pelton.ops.data import Batch, CacheGroup, Weight
from pelton.ops.memory import Memory, round_kv
from pelton.ops.spec import AttendSpec, RopeSpec, Rule


def batch(length: int, start: int = 0) -> Batch:
    """One sequence's positions start..start+length-1, its blocks out of order."""
    return Batch(
        ids=np.zeros(length, np.int32),
        positions=np.arange(start, start + length, dtype=np.int32),
        seq_starts=np.array([0, length], np.int32),
        tables=(np.array([[3, 1, 2]], np.int32),),
        logit_rows=np.arange(length, dtype=np.int32),
    )


def ops(length: int = 1, start: int = 0, memory: Memory | None = None, **options: Any) -> reference.Ops:
    return reference.Ops(batch(length, start), memory or Memory((), (), "f32"), **options)


def keys(kv_type: Any = "f32") -> Memory:
    return Memory([CacheGroup("full", 1, 1, 2, 2)], [4], kv_type)


def spec(**changes: Any) -> AttendSpec:
    fields = {"layer": 0, "group": 0, "slot": 0, "num_heads": 1, "num_kv_heads": 1, "head_dim": 2, "value_dim": 2}
    return AttendSpec(**(fields | {"scale": 1.0} | changes))


def matrix(values: np.ndarray, type: WeightType = WeightType.F32) -> reference.Matrix:
    tensor = Tensor.quantize("w", values, type)
    return reference.Matrix(Weight("w", type, tensor.shape, tensor.data), np.float32)


def test_equal_scores_route_to_the_lowest_ids():
    ids, weights = ops().route(np.zeros((1, 5), np.float32), num_chosen=3, normalize=True, scoring="softmax")
    assert ids.tolist() == [[0, 1, 2]]
    assert weights[0] == pytest.approx([1 / 3] * 3)


def test_routing_descends_and_keeps_raw_shares_unless_told_otherwise():
    scores = np.log(np.array([[1.0, 4.0, 2.0, 3.0]], np.float32))
    ids, weights = ops().route(scores, num_chosen=2, normalize=False, scoring="softmax")
    assert ids.tolist() == [[1, 3]]
    assert weights[0] == pytest.approx([0.4, 0.3])
    _, weights = ops().route(scores, num_chosen=2, normalize=False, scoring="sigmoid")
    assert weights[0] == pytest.approx([0.8, 0.75])


def test_experts_take_one_input_or_one_per_rank():
    experts = matrix(np.arange(12.0).reshape(3, 2, 2))
    ids = np.array([[2, 0]], np.int32)
    x = np.array([[1.0, 10.0]], np.float32)
    assert ops().expert_linear(x, experts, ids).tolist() == [[98.0, 120.0, 10.0, 32.0]]
    each = np.array([[1.0, 10.0, 100.0, 1.0]], np.float32)
    assert ops().expert_linear(each, experts, ids).tolist() == [[98.0, 120.0, 1.0, 203.0]]


def test_a_window_counts_the_current_token():
    values = np.arange(10, dtype=np.float32)[:, None].repeat(2, axis=1)
    nothing = np.zeros((10, 2), np.float32)
    seen = ops(10, memory=keys()).attend(nothing, nothing, values, spec=spec(window=3))
    assert seen[:, 0] == pytest.approx([0, 0.5, *range(1, 9)])


def test_scores_are_scaled_then_capped():
    q, k = np.array([[3.0, 0.0]] * 2, np.float32), np.array([[2.0, 0.0], [-1.0, 0.0]], np.float32)
    v = np.array([[1.0, 0.0], [0.0, 1.0]], np.float32)
    seen = ops(2, memory=keys()).attend(q, k, v, spec=spec(scale=0.5, softcap=2.0))
    exponentials = np.exp(2.0 * np.tanh(np.array([3.0, -1.5]) / 2.0))
    assert seen[1] == pytest.approx(exponentials / exponentials.sum(), rel=1e-6)


def test_keys_and_values_are_rounded_before_they_are_read():
    value = np.full((1, 2), 1 + 2.0**-9, np.float32)
    assert ops(1, memory=keys("bf16")).attend(value, value, value, spec=spec()).tolist() == [[1.0, 1.0]]
    assert ops(1, memory=keys("f16")).attend(value, value, value, spec=spec()).tolist() == value.tolist()
    assert ops(1, memory=keys("f32")).attend(value, value, value, spec=spec()).tolist() == value.tolist()


@pytest.mark.parametrize(
    ("kv_type", "largest"), [("f32", 3.38953139e38), ("bf16", 3.38953139e38), ("f16", 65504), ("int8", 3.38953139e38)]
)
def test_whatever_is_stored_is_finite(kv_type: Any, largest: float):
    bad = np.array([np.nan, np.inf, -np.inf, 3.4e38, 0.0], np.float32)
    assert round_kv(bad, kv_type) == pytest.approx([0, largest, -largest, largest, 0])


def test_int8_has_a_scale_for_each_token_head_and_32_columns():
    x = np.zeros((2, 2, 40), np.float32)  # [tokens, heads, columns]
    x[0, 0, :2], x[0, 0, 32:34], x[1, 0, :2] = (127, 0.6), (1270, 6), (0, 3)
    rounded = round_kv(x, "int8")
    assert rounded[0, 0, :2].tolist() == [127, 1]
    assert rounded[0, 0, 32:34].tolist() == [1270, 10]
    assert rounded[1, 0, :2] == pytest.approx([0, 3])
    assert np.count_nonzero(rounded) == 5


def test_halves_keep_what_is_subnormal():
    x = np.array([2.0**-24, 3 * 2.0**-25, 2.0**-25, -(2.0**-15) - 2.0**-24], np.float32)
    assert round_kv(x, "f16").tolist() == [2.0**-24, 2.0**-23, 0.0, x[3]]


def test_rope_turns_halves_against_each_other_and_leaves_the_rest():
    x = np.array([[1.0, 2.0, 0.0, 0.0, 5.0]] * 2, np.float32)
    y = ops(2).rope(x, np.array([0, 1], np.int32), num_heads=1, spec=RopeSpec(4, (np.pi / 2, np.pi), 2.0))
    assert y[0] == pytest.approx([2, 4, 0, 0, 5])
    assert y[1] == pytest.approx([0, -4, 2, 0, 5], abs=1e-6)


def test_norms_go_by_groups_of_columns():
    x = np.array([[3.0, 4.0, 30.0, 40.0]], np.float32)
    y = ops().rms_norm(x, np.array([1.0, 2.0], np.float32), eps=0.0, num_groups=2)
    assert y[0] == pytest.approx(np.array([3, 8, 3, 8]) / np.sqrt(12.5))


def test_columns_are_cut_and_joined_by_groups():
    x = np.arange(6, dtype=np.float32)[None]
    left, right = ops().regroup(x, groups=2, take=(0, 1)), ops().regroup(x, groups=2, take=(1, 3))
    assert left.tolist() == [[0, 3]]
    assert right.tolist() == [[1, 2, 4, 5]]
    assert ops().concat((left, right), groups=2).tolist() == x.tolist()
    assert ops().concat(ops().split(x, (1, 2, 3))).tolist() == x.tolist()
    assert ops().repeat(left, 2).tolist() == [[0, 3, 0, 3]]


def test_activations_at_known_points():
    x = np.array([[-1.0, 0.0, 2.0]])
    known = {
        "silu": [-0.2689414, 0, 1.7615942],
        "gelu": [-0.1586553, 0, 1.9544997],
        "gelu_tanh": [-0.1588080, 0, 1.9545977],
        "relu": [0, 0, 2],
        "sigmoid": [0.2689414, 0.5, 0.8807971],
        "softplus": [0.3132617, 0.6931472, 2.1269280],
    }
    assert set(known) == set(reference.ACTIVATIONS)
    for kind, values in known.items():
        assert ops().act(x, kind)[0] == pytest.approx(values, abs=1e-6)


@pytest.mark.parametrize("rule", ["conv", "selective_scan"])
def test_recurrence_goes_on_over_chunks_and_starts_anew_at_position_0(rule: Rule):
    rng = np.random.default_rng(0)
    width, length = 3, 9
    x = rng.normal(size=(length, width)).astype(np.float32)
    tokens = {"dt": rng.random((length, width)), "B": rng.normal(size=(length, 2)), "C": rng.normal(size=(length, 2))}
    fixed = {"a": matrix(-rng.random((width, 2))), "d": rng.normal(size=width)}
    if rule == "conv":
        tokens, fixed = {}, {"weight": matrix(rng.normal(size=(width, 4))), "bias": rng.normal(size=width)}
    state_size = {"conv": 3 * width, "selective_scan": 2 * width}[rule]
    memory = Memory([CacheGroup("state", 1, 1, state_size, 0)], [4], "f32")

    def run(start: int, stop: int) -> np.ndarray:
        params = fixed | {name: values[start:stop] for name, values in tokens.items()}
        step = ops(stop - start, start, memory)
        return step.recur(x[start:stop], params, rule=rule, layer=0, group=0, slot=0)

    whole = run(0, length)
    pieces = np.concatenate([run(0, 2), run(2, 3), run(3, length)])
    assert np.allclose(pieces, whole, atol=1e-6)
    if rule == "conv":
        kernel = fixed["weight"].values
        by_hand = sum(kernel[:, j] * x[5 - 3 + j] for j in range(4)) + fixed["bias"]
        assert np.allclose(whole[5], by_hand, atol=1e-6)


def test_linear_takes_the_family_of_the_weights_type():
    rng = np.random.default_rng(1)
    x, values = rng.normal(size=(3, 64)).astype(np.float32), rng.normal(size=(5, 64))
    weight = matrix(values, WeightType.Q8_0)
    families = {
        "float": x @ weight.values.T,
        "int8": numerics.linear_int8(WeightType.Q8_0, weight.rows, x),
        "bf16": numerics.linear_bf16(WeightType.Q8_0, weight.rows, x),
    }
    for family, want in families.items():
        got = ops(family_of=lambda type, family=family: family).linear(x, weight)
        assert np.array_equal(got, want)
    assert len({got.tobytes() for got in families.values()}) == 3


def test_rows_of_a_permuted_weight_come_in_the_models_order():
    tensor = Tensor.quantize("w", np.arange(8.0).reshape(4, 2), WeightType.F32)
    weight = Weight("w", WeightType.F32, (4, 2), tensor.data, np.array([2, 0, 3, 1], np.int32))
    bound = reference.bind({"w": weight, "b": Weight("b", WeightType.F32, (2,), tensor.data[:8])})
    assert bound["w"].values[:, 0].tolist() == [4, 0, 6, 2]
    assert bound["b"].tolist() == [0, 1]


def test_the_head_cuts_padding_and_caps():
    x = np.array([[100.0, 0.0]], np.float32)
    got = ops().logits(x, matrix(np.array([[1.0, 0], [0, 1], [5, 5]])), num_valid=2, softcap=30.0)
    assert got[0] == pytest.approx([30 * np.tanh(100 / 30), 0])
