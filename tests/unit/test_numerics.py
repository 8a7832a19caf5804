"""The twins' own foundations: a fused multiply-add that rounds once, and the rounding of activations."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pelton.formats import quants
from pelton.formats.quants import WeightType
from pelton.ops import numerics

QUANTISED = [t for t in WeightType if quants.is_supported(t) and quants.block_size(t) > 1]

finite = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**60), max_value=2.0**60)


def nearest(value: Fraction) -> np.float32:
    """The float32 nearest to an exact value, ties to even."""
    guess = np.float32(float(value))
    candidates = [guess, np.nextafter(guess, np.float32(np.inf)), np.nextafter(guess, np.float32(-np.inf))]
    return min(candidates, key=lambda c: (abs(Fraction(float(c)) - value), int(c.view(np.uint32)) & 1))


@given(finite, finite, finite)
def test_fma_rounds_once(a: float, b: float, c: float) -> None:
    assert numerics.fma(a, b, c) == nearest(Fraction(a) * Fraction(b) + Fraction(c))


def test_fma_where_rounding_twice_goes_wrong() -> None:
    a, b = np.float32(1 + 2.0**-12), np.float32(1 + 2.0**-12)  # product 1 + 2^-11 + 2^-24: a tie in float32
    for c in (np.float32(2.0**-80), np.float32(-(2.0**-80))):
        expected = nearest(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)))
        assert numerics.fma(a, b, c) == expected
        assert (np.float32(np.float64(a) * np.float64(b) + np.float64(c)) == expected) == (c < 0)


def test_activations_are_rounded_to_even_in_blocks_of_32() -> None:
    x = np.zeros((1, 64), np.float32)
    x[0, :4] = [127, 0.5, 1.5, -2.5]
    values, scales = numerics.quantize_activations(x)
    assert values[0, :4].tolist() == [127, 0, 2, -2]
    assert scales.tolist() == [[1, 0]]


@pytest.mark.parametrize("type", QUANTISED, ids=lambda t: t.name)
def test_int8_is_near_the_float_result(type: WeightType) -> None:
    rng = np.random.default_rng(1)
    rows = quants.quantize(type, rng.standard_normal((8, 512)))
    x = rng.standard_normal((4, 512)).astype(np.float32)
    expected = numerics.linear_float(type, rows, x)
    assert np.abs(numerics.linear_int8(type, rows, x) - expected).max() < 0.02 * np.abs(expected).max()
    assert np.abs(numerics.linear_bf16(type, rows, x) - expected).max() < 0.01 * np.abs(expected).max()


def test_bf16_adds_even_and_odd_columns_of_each_step_apart() -> None:
    x = np.zeros((1, 64), np.float32)
    x[0, :4] = [2.0**24, 1, -(2.0**24), 1]  # even columns cancel, odd ones give 2
    x[0, 32:34] = [2.0**24, 1]  # 2**24 + 1 is rounded before it meets the total
    ones = quants.quantize(WeightType.BF16, np.ones((1, 64), np.float32))
    assert numerics.linear_bf16(WeightType.BF16, ones, x).tolist() == [[2.0**24 + 2]]


def test_bf16_operands_are_rounded_to_even_and_subnormal_ones_are_zero() -> None:
    values = np.float32([1 + 2.0**-8, 1 + 3 * 2.0**-8, 2.0**-126, 2.0**-127, -(2.0**-130)])
    rounded = numerics.bf16_operand(values)
    assert rounded.tolist() == [1, 1 + 2.0**-6, 2.0**-126, 0, 0]
    assert np.signbit(rounded).tolist() == [False, False, False, False, True]


def relative_error(actual: npt.NDArray[np.float32], exact: npt.NDArray[np.float32]) -> float:
    return float(np.linalg.norm(actual.astype(np.float64) - exact) / np.linalg.norm(exact.astype(np.float64)))


@pytest.mark.parametrize("type", [*QUANTISED, WeightType.F16, WeightType.BF16], ids=lambda t: t.name)
def test_bf16_weights_are_about_as_near_as_the_nearest_bf16(type: WeightType) -> None:
    rows = quants.quantize(type, np.random.default_rng(2).standard_normal((16, 1024)))
    exact = quants.dequantize(type, rows)
    nearest = relative_error(numerics.bf16_operand(exact), exact)
    assert relative_error(numerics.bf16_values(type, rows), exact) <= 1.2 * nearest


@pytest.mark.parametrize("type", QUANTISED, ids=lambda t: t.name)
def test_bf16_weights_of_blocks_with_very_unlike_scales_stay_near(type: WeightType) -> None:
    """Blocks in a row whose scales differ by 2**16 in both directions, some negative, one zero."""
    block = quants.block_size(type)
    values = np.random.default_rng(3).standard_normal((16, 6, block)).astype(np.float32) * np.float32(2.0**-8)
    values *= np.float32([1, 2.0**16, -(2.0**-4), 0, 2.0**8, 1])[:, None]
    rows = quants.quantize(type, values.reshape(16, -1))
    exact, ours = (x.reshape(values.shape) for x in (quants.dequantize(type, rows), numerics.bf16_values(type, rows)))
    for b in (0, 1, 2, 4, 5):
        assert relative_error(ours[:, b], exact[:, b]) < 4e-3
    assert (ours[:, 3] == 0).all()


@pytest.mark.parametrize("type", QUANTISED, ids=lambda t: t.name)
def test_a_scale_that_is_not_finite_spoils_its_row_alone(type: WeightType) -> None:
    rows = quants.quantize(type, np.random.default_rng(4).standard_normal((3, 512)))
    x = np.random.default_rng(5).standard_normal((2, 512)).astype(np.float32)
    clean = numerics.linear_bf16(type, rows, x)
    blocks = quants.as_blocks(type, rows)
    blocks["d"][1, -1] = np.inf
    out = numerics.linear_bf16(type, rows, x)
    assert np.isnan(out[:, 1]).all()
    assert (out[:, [0, 2]] == clean[:, [0, 2]]).all()


@pytest.mark.parametrize("type", QUANTISED, ids=lambda t: t.name)
def test_bf16_weights_of_subnormal_scales_are_not_lost(type: WeightType) -> None:
    rows = quants.quantize(type, np.random.default_rng(6).standard_normal((4, 512)) * 2.0**-12)
    exact = quants.dequantize(type, rows)
    assert relative_error(numerics.bf16_values(type, rows), exact) < 3e-3
