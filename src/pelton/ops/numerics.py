"""The linear kernels' arithmetic in plain NumPy, bit for bit: one function per kernel family.

- `linear_int8`: block-quantised weights against activations rounded to int8 in blocks of 32 columns. Integer sums
  are exact; floats meet only in the one fused multiply-add per block (two where the type has minima).
- `linear_float32`: F32, F16 and BF16 weights, widened exactly; one fused multiply-add per column.
- `linear_bf16`: weights (`bf16_weights`) and activations rounded to bf16, products summed in float32 in the order of
  the tile hardware.
- `linear_float`: the file's weights as they are, in float64: what other implementations are compared with.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pelton.formats.quants import Blocks, WeightType, as_blocks, bf16_to_f32, block_size, dequantize, f32_to_bf16

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]

BLOCK = 32
"""Columns that share one activation scale."""
SMALLEST = np.float32(2.0**-100)
"""A block whose largest magnitude is below this counts as zeros: 127 / largest would overflow."""
SMALLEST_NORMAL = np.float32(2.0**-126)
TILE_STEP = 32
"""Columns of one tile product."""


def fma(a: npt.ArrayLike, b: npt.ArrayLike, c: npt.ArrayLike) -> F32:
    """a * b + c of float32, rounded once to float32. Broadcasts.

    The product of two float32 is exact in float64. Their sum is rounded to odd: if the float64 sum is inexact (its
    error is known exactly, by Knuth's two-sum) and even, it moves one step towards the true value. A number with
    at least two more bits than the target, rounded to odd, can be rounded again as if it were the true value
    (Boldo and Melquiond, Emulation of a FMA and correctly rounded sums, 2008, theorem 1).
    """
    with np.errstate(over="ignore", invalid="ignore"):
        product = np.asarray(a, np.float64) * np.asarray(b, np.float64)
        addend = np.asarray(c, np.float64)
        total = np.asarray(product + addend)
        rest = total - product
        error = (product - (total - rest)) + (addend - rest)
        is_inexact = (error != 0) & np.isfinite(error)
        is_even = (total.view(np.int64) & 1) == 0
        towards = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
        return np.where(is_inexact & is_even, towards, total).astype(np.float32)


def quantize_activations(x: F32) -> tuple[I64, F32]:
    """[M, K] -> int8 values [M, K] and scales [M, K/32]: x is about scale * value.

    A block's scale is its largest magnitude / 127 and its values are x * (127 / largest), rounded to the nearest,
    ties to even. A block of (nearly) zeros has scale 0. A block that holds NaN or infinity has scale NaN and values
    0, so that every output of its row is NaN.
    """
    blocks = np.ascontiguousarray(x, np.float32).reshape(x.shape[0], -1, BLOCK)
    is_finite = np.isfinite(blocks).all(axis=2)
    largest = np.where(is_finite, np.abs(blocks).max(axis=2), np.float32(np.nan))
    is_zero = largest < SMALLEST
    divisor = np.where(is_zero | ~is_finite, np.float32(1), largest)
    inverse = np.float32(127) / divisor
    usable = np.where((is_finite & ~is_zero)[..., None], blocks, np.float32(0))
    values = np.rint(usable * inverse[..., None])
    scales = np.where(is_zero, np.float32(0), largest / np.float32(127))
    return values.astype(np.int64).reshape(x.shape), scales


def _with_fields(blocks: Blocks, **fields: float) -> Blocks:
    """A copy in which some of the (d, dmin, m) are set; fields that the type lacks are left out."""
    copy = blocks.copy()
    for name, value in fields.items():
        if name in (copy.dtype.names or ()):
            copy[name] = value
    return copy


def _decode(type: WeightType, blocks: Blocks) -> F32:
    return dequantize(type, blocks.view(np.uint8).reshape(len(blocks), -1))


class Integers:
    """A weight as integers: w[n, k] = scale[n, k // 32] * values[n, k] + minimum, where there is one.

    `values` hold the sub-block scales of K-quants. Minima are float32 per 32 columns (`minima`), or for Q2_K, which
    has two per 32, integers per 16 columns (`half_minima`) times `half_scale`, per 32 columns again.
    """

    minima: F32 | None = None
    half_minima: I64 | None = None
    half_scale: F32

    def __init__(self, type: WeightType, rows: U8) -> None:
        blocks = as_blocks(type, rows)
        names: tuple[str, ...] = blocks.dtype.names or ()
        per_block = block_size(type) // BLOCK
        self.values = _decode(type, _with_fields(blocks, d=1, dmin=0, m=0)).astype(np.int64)
        self.scale = blocks["d"].astype(np.float32).repeat(per_block, axis=1)
        if type is WeightType.Q2_K:
            self.half_minima = _decode(type, _with_fields(blocks, d=0, dmin=1))[:, :: BLOCK // 2].astype(np.int64)
            self.half_scale = blocks["dmin"].astype(np.float32).repeat(per_block, axis=1)
        elif "m" in names or "dmin" in names:
            self.minima = _decode(type, _with_fields(blocks, d=0))[:, ::BLOCK]


def linear_int8(type: WeightType, rows: U8, x: F32) -> F32:
    """[N, row bytes], [M, K] -> [M, N]: the Int8 family's x @ w.T, the same bits as its kernels.

    Per block of 32 columns, ascending: sum = fma(float(dot), scale_w * scale_x, sum), dot being the exact integer dot
    product; then for types with minima sum = fma(minimum, scale_x * sum(x), sum). Q2_K, which has two minima per
    block: sum = fma(float(dot of minima and half sums of x), dmin * scale_x, sum).
    """
    w = Integers(type, rows)
    values, scales = quantize_activations(x)
    total = np.zeros((len(x), len(rows)), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for b in range(scales.shape[1]):
            columns = slice(b * BLOCK, (b + 1) * BLOCK)
            q, scale = values[:, columns], scales[:, b : b + 1]
            dot = (q @ w.values[:, columns].T).astype(np.float32)
            total = fma(dot, w.scale[:, b] * scale, total)
            if w.minima is not None:
                total = fma(w.minima[:, b], scale * q.sum(axis=1, keepdims=True).astype(np.float32), total)
            if w.half_minima is not None:
                half_sums = q.reshape(len(x), 2, BLOCK // 2).sum(axis=2)
                minimum = (half_sums @ w.half_minima[:, 2 * b : 2 * b + 2].T).astype(np.float32)
                total = fma(minimum, w.half_scale[:, b] * scale, total)
    return total


def linear_float32(type: WeightType, rows: U8, x: F32) -> F32:
    """[N, row bytes], [M, K] -> [M, N]: the Float32 family's x @ w.T, the same bits as its kernels.

    sum = fma(x[k], w[k], sum) over the columns, ascending, from zero.
    """
    w = dequantize(type, rows)
    total = np.zeros((len(x), len(rows)), np.float32)
    for k in range(x.shape[1]):
        total = fma(x[:, k : k + 1], w[:, k], total)
    return total


def _flush(x: F32) -> F32:
    """Subnormal values to zero of the same sign, as the tile hardware treats what it reads and writes."""
    return np.where(np.abs(x) < SMALLEST_NORMAL, np.copysign(np.float32(0), x), x)


def bf16_operand(x: F32) -> F32:
    """The float32 of the nearest bf16, ties to even; subnormal values are zero. Any shape."""
    return bf16_to_f32(f32_to_bf16(_flush(np.asarray(x, np.float32))))


_OPERAND_SCALE, _ACTIVATION_SCALE = 2.0**-112, np.float32(2.0**48)
_REACH: dict[WeightType, tuple[float, float]] = {
    WeightType.F16: (1, 0),
    WeightType.Q4_0: (8, 0),
    WeightType.Q4_1: (15, 1),
    WeightType.Q5_0: (16, 0),
    WeightType.Q5_1: (31, 1),
    WeightType.Q8_0: (128, 0),
    WeightType.Q2_K: (15 * 3, 15),
    WeightType.Q3_K: (32 * 4, 0),
    WeightType.Q4_K: (63 * 15, 63),
    WeightType.Q5_K: (63 * 31, 63),
    WeightType.Q6_K: (128 * 32, 0),
    WeightType.IQ4_NL: (127, 0),
    WeightType.IQ4_XS: (32 * 127, 0),
}
"""What a block's binary16 scale, and its minimum, are multiplied by at most."""
_ROWS_AT_ONCE = 1024
"""Rows unpacked at a time, in float64: it bounds the memory that takes."""
_CENTRES = {WeightType.Q4_1: 8, WeightType.Q2_K: 2, WeightType.Q4_K: 8}
"""Of types with a minimum: the code from which the tiles' kernels count."""
_ALL_BITS_CODES = {
    WeightType.Q2_K: 3,
    WeightType.Q3_K: 3,
    WeightType.Q4_K: 15,
    WeightType.Q5_K: 31,
    WeightType.Q6_K: 31,
    WeightType.IQ4_XS: 113,
}
"""Of types with integer scales: what a code stands for whose bits are all ones."""


def _half(x: npt.ArrayLike) -> F64:
    """The nearest binary16 numbers, ties to even, as float64."""
    return np.asarray(x, np.float64).astype(np.float16).astype(np.float64)


def _operand(half: F64) -> F32:
    """Binary16 numbers as the tiles' operands: rounded to bf16, halves away from zero, and 2**112 times smaller."""
    bits = half.astype(np.float16).view(np.uint16).astype(np.uint32)
    size = ((bits & 0x7FFF) + 4) >> 3
    return _flush(bf16_to_f32(((bits & 0x8000) | size).astype(np.uint16)))


def _codes_and_scales(type: WeightType, blocks: Blocks) -> tuple[F64, F64, F64]:
    """What codes stand for, integer scales, integer minima (one where the type has no such thing), [n, block] each."""
    codes = _decode(type, _with_fields(blocks, d=1, dmin=0, m=0)).astype(np.float64)
    if type not in _ALL_BITS_CODES:
        return codes, np.ones_like(codes), np.ones_like(codes)
    ones = _with_fields(blocks, d=1, dmin=0, qs=0xFF, qh=0xFF, ql=0xFF, hmask=0xFF)
    scales = _decode(type, ones).astype(np.float64) / _ALL_BITS_CODES[type]
    minima = -_decode(type, _with_fields(blocks, d=0, dmin=1)).astype(np.float64)
    return np.divide(codes, scales, out=np.zeros_like(codes), where=scales != 0), scales, minima


def bf16_weights(type: WeightType, rows: U8) -> tuple[F32, F32]:
    """[N, row bytes] -> operands [N, K] of the tile products, and the scales [N] of their sums.

    A weight is operand * scale * 2**48. BF16 weights stay what they are. All others are computed in binary16:

    - A row's binary16 numbers are multiplied by 2**e and rounded to binary16, e being such that the largest magnitude
      that they and the type allow lies in [2**14, 2**15): what is below about 2**-28 of it loses precision.
    - w = scale * (code - centre) + minimum, rounded once. Scale and minimum of K-quants are products, rounded;
      minimum includes scale * centre, rounded, where the type has a minimum.
    - Operands are w rounded to bf16, halves away from zero, and 2**112 times smaller, as their bits are those of w
      shifted by three; what is then subnormal is zero.

    A row with a binary16 number that is not finite has scale NaN.
    """
    if type is WeightType.BF16:
        return _flush(dequantize(type, rows)), np.full(len(rows), 1 / _ACTIVATION_SCALE)
    parts = [_bf16_rows(type, rows[n : n + _ROWS_AT_ONCE]) for n in range(0, len(rows), _ROWS_AT_ONCE)]
    return np.concatenate([operands for operands, _ in parts]), np.concatenate([scale for _, scale in parts])


def _bf16_rows(type: WeightType, rows: U8) -> tuple[F32, F32]:
    blocks = as_blocks(type, rows)
    names: tuple[str, ...] = blocks.dtype.names or ()
    halves = [
        blocks[name].reshape(len(rows), -1).astype(np.float32) for name in ("x", "d", "dmin", "m") if name in names
    ]
    is_finite = np.all([np.isfinite(x).all(axis=1) for x in halves], axis=0)
    halves = [np.where(np.isfinite(x), x, np.float32(0)) for x in halves]
    reaches = [np.abs(x) * np.float32(reach) for x, reach in zip(halves, _REACH[type], strict=False)]
    largest = sum(reaches[1:], reaches[0]).max(axis=1)
    exponent = np.where(largest > 0, 15 - np.frexp(largest)[1], 0)
    scale = np.where(is_finite, np.ldexp(np.float32(1), 64 - exponent), np.float32(np.nan)).astype(np.float32)
    scaled = [_half(np.ldexp(x.astype(np.float64), exponent[:, None])) for x in halves]
    if type is WeightType.F16:
        return _operand(scaled[0]), scale
    codes, scales, minima = (x.reshape(len(rows), -1) for x in _codes_and_scales(type, blocks))
    scaled = [x.repeat(block_size(type), axis=1) for x in scaled]
    factor = _half(scaled[0] * scales)
    if len(scaled) == 1:
        return _operand(_half(factor * codes)), scale
    sign = 1 if "m" in names else -1
    centre = _CENTRES.get(type, 0)
    minimum = _half(factor * centre + _half(sign * scaled[1] * minima))
    return _operand(_half(factor * (codes - centre) + minimum)), scale


def bf16_values(type: WeightType, rows: U8) -> F32:
    """[N, row bytes] -> [N, K]: the weights as the BFloat16 family computes with them."""
    operands, scale = bf16_weights(type, rows)
    return operands * (scale * _ACTIVATION_SCALE)[:, None]


def linear_bf16(type: WeightType, rows: U8, x: F32) -> F32:
    """[N, row bytes], [M, K] -> [M, N]: the BFloat16 family's x @ w.T, the same bits as its kernels.

    Activations are multiplied by 2**48 and rounded to bf16; weights are `bf16_weights`. Per step of 32 columns,
    ascending: two float32 sums from zero, one over the even and one over the odd columns, ascending, one fused
    multiply-add each; their sum is added to the total. Subnormal results are zero (Intel SDM volume 2, TDPBF16PS). The
    total is multiplied by the row's scale.
    """
    w, scale = bf16_weights(type, rows)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        x = bf16_operand(x * _ACTIVATION_SCALE)
        total = np.zeros((len(x), len(rows)), np.float32)
        for step in range(0, x.shape[1], TILE_STEP):
            sums = [np.zeros_like(total), np.zeros_like(total)]
            for k in range(step, min(step + TILE_STEP, x.shape[1])):
                sums[k % 2] = _flush(fma(x[:, k : k + 1], w[:, k], sums[k % 2]))
            total = _flush(total + _flush(sums[0] + sums[1]))
        return total * scale


def linear_float(type: WeightType, rows: U8, x: F32) -> F32:
    """[N, row bytes], [M, K] -> [M, N]: the dequantised weights as they are, in float64."""
    total: npt.NDArray[Any] = x.astype(np.float64) @ dequantize(type, rows).astype(np.float64).T
    return total.astype(np.float32)
