"""Each row op and epilogue on each instruction set against the reference.

A case is a small model of one op: rows of an embedding in, an identity matrix as head, so that the logits are the
op's own result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from pelton import _core
from pelton.backends.base import BackendConfig, LoadSpec
from pelton.backends.cpu.backend import CpuBackend
from pelton.formats.quants import WeightType
from pelton.ops import reference
from pelton.ops.data import Batch, Weight
from pelton.ops.memory import Memory
from pelton.ops.spec import RopeSpec

NUM_TOKENS = 37  # three blocks of rows, the last one short
POSITIONS = np.random.default_rng(1).integers(0, 100_000, NUM_TOKENS).astype(np.int32)
Case = Callable[[Any, Any, Any, Any], Any]
"""(ops, x, weights, batch) -> result; x is [T, width]."""


@cache
def backend(isa: str) -> CpuBackend:
    return CpuBackend(BackendConfig(num_threads=2, isa=isa))


def f32(name: str, values: np.ndarray) -> Weight:
    values = np.ascontiguousarray(values, np.float32)
    return Weight(name, WeightType.F32, values.shape, values.reshape(-1).view(np.uint8))


def values_of(width: int, spread: float = 3.0) -> np.ndarray:
    """Rows of very different sizes, an all-zero one among them."""
    rng = np.random.default_rng(width)
    x = rng.normal(0, spread, (NUM_TOKENS, width)) * 10.0 ** rng.uniform(-2, 1, (NUM_TOKENS, 1))
    x[5] = 0
    return x.astype(np.float32)


def batch() -> Batch:
    order = np.random.default_rng(2).permutation(NUM_TOKENS).astype(np.int32)
    starts = np.array([0, NUM_TOKENS], np.int32)
    return Batch(np.arange(NUM_TOKENS, dtype=np.int32), POSITIONS, starts, (), order)


def both(case: Case, x: np.ndarray, isa: str, **weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The backend's result and the reference's, in float64."""
    given = {name: f32(name, values) for name, values in {"x": x, **weights}.items()}
    inner = reference.Ops(batch(), Memory((), (), "f32", np.float64))
    bound = reference.bind(given, np.float64)
    want = inner.take(case(inner, inner.embed(bound["x"], batch().ids), bound, batch()), batch().logit_rows)
    width = want.shape[1]
    given["identity"] = f32("identity", np.eye(width))

    def record(ops: Any, w: Any, batch: Any) -> Any:
        y = case(ops, ops.embed(w["x"], batch.ids), w, batch)
        return ops.logits(ops.take(y, batch.logit_rows), w["identity"], num_valid=width)

    spec = LoadSpec(record, given, (), width, "f32", (), NUM_TOKENS, NUM_TOKENS, 1 << 17)
    return backend(isa).load(spec).submit(batch()).logits(), want


def check(case: Case, x: np.ndarray, isa: str, *, tolerance: float = 2e-6, **weights: np.ndarray) -> None:
    """Row by row, within a share of the row's largest value."""
    got, want = both(case, x, isa, **weights)
    error = np.abs(got - want).max(axis=1)
    assert (error <= tolerance * np.maximum(np.abs(want).max(axis=1), 1e-6)).all(), error.max()


ISAS = pytest.mark.parametrize("isa", _core.isas())
WIDTHS = pytest.mark.parametrize("width", [1, 15, 16, 96, 577])


def vector(width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(1, 0.5, width).astype(np.float32)


@ISAS
@WIDTHS
def test_norms(isa: str, width: int):
    x, w, b = values_of(width), vector(width), vector(width, 1)
    check(lambda ops, x, w, _: ops.rms_norm(x, w["w"], eps=1e-5), x, isa, w=w)
    check(lambda ops, x, w, _: ops.rms_norm(x, None, eps=1e-6), x, isa)
    if width > 1:
        shifted = x + np.float32(2) * np.abs(x).max(axis=1, keepdims=True)
        check(lambda ops, x, w, _: ops.layer_norm(x, w["w"], w["b"], eps=1e-5), shifted, isa, tolerance=2e-5, w=w, b=b)
        check(lambda ops, x, w, _: ops.layer_norm(x, w["w"], None, eps=1e-5), x, isa, tolerance=1e-5, w=w)


@ISAS
@pytest.mark.parametrize("head_dim", [8, 20, 64])
def test_norms_of_heads(isa: str, head_dim: int):
    w = vector(head_dim)
    check(lambda ops, x, w, _: ops.rms_norm(x, w["w"], eps=1e-6, num_groups=3), values_of(3 * head_dim), isa, w=w)


@ISAS
@pytest.mark.parametrize(("head_dim", "dim"), [(64, 64), (40, 24), (8, 8), (4, 2)])
def test_rope_far_from_the_start(isa: str, head_dim: int, dim: int):
    spec = RopeSpec(dim, tuple(10000.0 ** (-2 * i / dim) for i in range(dim // 2)), scale=1.25)
    check(lambda ops, x, w, b: ops.rope(x, b.positions, num_heads=3, spec=spec), values_of(3 * head_dim), isa)


@ISAS
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "gelu", "relu", "sigmoid", "softplus"])
def test_activations(isa: str, kind: Any):
    x = np.linspace(-30, 30, NUM_TOKENS * 61, dtype=np.float32).reshape(NUM_TOKENS, 61)
    x[0, :6] = [0.0, -0.0, 1e-8, -1e-8, 100.0, -100.0]
    got, want = both(lambda ops, x, w, _: ops.act(x, kind), x, isa)
    assert np.abs(got - want).max() < 3e-6
    assert (np.abs(got - want) <= 3e-6 * np.abs(want) + 3e-7).all()
    check(lambda ops, x, w, _: ops.glu(*ops.split(x, (30, 31 - 1, 1))[:2], kind), x, isa, tolerance=3e-6)


@ISAS
@WIDTHS
def test_arithmetic(isa: str, width: int):
    x, w = values_of(2 * width), vector(width)

    def case(ops: Any, x: Any, weights: Any, batch: Any) -> Any:
        a, b = ops.split(x, (width, width))
        row_weights, _ = ops.split(x, (1, 2 * width - 1))
        y = ops.add(ops.mul(a, weights["w"]), ops.scale(b, 0.3))
        return ops.add(ops.add(ops.mul(y, row_weights), weights["w"]), ops.mul(a, b))

    check(case, x, isa, w=w)


@ISAS
def test_softcap_is_close_to_the_identity_near_zero(isa: str):
    x = np.geomspace(1e-4, 1e3, NUM_TOKENS * 48, dtype=np.float32).reshape(NUM_TOKENS, 48)
    got, want = both(lambda ops, x, w, _: ops.softcap(x, 30.0), x, isa)
    np.testing.assert_allclose(got, want, rtol=1e-6)


@ISAS
def test_moving_columns_is_exact(isa: str):
    def case(ops: Any, x: Any, w: Any, batch: Any) -> Any:
        a, b, c = ops.split(x, (24, 6, 30))
        heads = ops.concat((a, c), groups=6)  # 4 + 5 columns of each of six heads
        return ops.concat((ops.regroup(heads, groups=6, take=(1, 7)), ops.repeat(b, 3)))

    got, want = both(case, values_of(60), isa)
    np.testing.assert_array_equal(got, want)


@ISAS
@pytest.mark.parametrize("width", [16, 33])
def test_epilogues_equal_the_ops_that_they_replace(isa: str, width: int):
    """Fused or not, the bits are the same: `keep` reads the plain result and so forbids the fusion."""
    rng = np.random.default_rng(0)
    matrices = {name: rng.normal(0, 0.3, (width, 64)).astype(np.float32) for name in ("a", "b")}
    bias, x = vector(width), values_of(64)

    def case(ops: Any, x: Any, w: Any, batch: Any, fused: bool) -> Any:
        def linear(name: str) -> Any:
            y = ops.linear(x, w[name], w["bias"])
            kept.append(y)
            return y

        kept: list[Any] = []
        parts = [
            ops.add(linear("a"), linear("b")),
            ops.act(linear("a"), "silu"),
            ops.glu(linear("a"), linear("b"), "gelu_tanh"),
        ]
        if fused:
            return ops.concat(tuple(parts))
        zero = ops.scale(ops.concat(tuple(kept)), 0.0)
        return ops.add(ops.concat(tuple(parts)), ops.split(zero, (3 * width, 2 * width))[0])

    plain, want = both(lambda *args: case(*args, fused=False), x, isa, bias=bias, **matrices)
    fused, _ = both(lambda *args: case(*args, fused=True), x, isa, bias=bias, **matrices)
    np.testing.assert_array_equal(fused, plain)
    assert np.abs(plain - want).max() <= 1e-5 * np.abs(want).max()
