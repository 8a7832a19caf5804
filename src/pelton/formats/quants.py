"""One row per weight type: its block as a struct, and NumPy both ways.

Layouts are those of GGML (`ggml-common.h`, `ggml-quants.c` of llama.cpp), little-endian. The functions here
are the definition that kernels are tested against: `dequantize` gives the same bits as llama.cpp's own.
`quantize` of the types with blocks of 32 does too; for K-quants and IQ4 it is a plain quantiser without llama.cpp's
search for better scales.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from pelton.errors import UnsupportedModel
from pelton.formats import iq4, kquants

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]
Ints = npt.NDArray[np.integer[Any]]
"""Small non-negative integers, held as uint8."""
Blocks = npt.NDArray[Any]
"""[n] of a type's block struct."""


class WeightType(IntEnum):
    """Weight types by their GGML id, as GGUF files store it. The integers and F64 can only be named."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    IQ4_NL = 20
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    BF16 = 30


OTHER_TYPES = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
}
"""GGML's further types, by id: known so that an error can name them."""


def f32_to_bf16(x: npt.ArrayLike) -> npt.NDArray[np.uint16]:
    """The bits of the nearest bf16, ties to even; NaN stays a (quiet) NaN. Any shape."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    quiet_nan = (bits >> np.uint32(16)) | np.uint32(0x40)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(is_nan, quiet_nan, rounded).astype(np.uint16)


def bf16_to_f32(bits: npt.NDArray[np.uint16]) -> F32:
    """The float32 of the same value. Any shape."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_f16(x: npt.ArrayLike) -> npt.NDArray[np.float16]:
    """The nearest half; beyond its range: infinity, without a warning. Any shape."""
    with np.errstate(over="ignore"):
        return np.asarray(x, np.float32).astype(np.float16)


def _inverse(d: F32) -> F32:
    """1/d, and 0 where d is 0."""
    return np.divide(np.float32(1), d, out=np.zeros_like(d), where=d != 0)


def _split_nibbles(qs: Ints) -> Ints:
    """[n, 16] -> [n, 32]: the low nibbles are the first half of a block."""
    return np.concatenate([qs & 0x0F, qs >> 4], axis=1)


def _join_nibbles(q: Ints) -> Ints:
    """[n, 32] -> [n, 16]; bits above the fourth are dropped."""
    return (q[:, :16] & 0x0F) | (q[:, 16:] << 4)


def _split_fives(b: Blocks) -> Ints:
    """The 5-bit values of Q5 blocks, [n, 32]: the fifth bit of value i is bit i of `qh`."""
    high = np.unpackbits(b["qh"], axis=1, bitorder="little")
    return _split_nibbles(b["qs"]) | (high << 4)


def _join_fives(b: Blocks, q: Ints) -> None:
    b["qs"] = _join_nibbles(q)
    b["qh"] = np.packbits(q >> 4, axis=1, bitorder="little")


def _column(x: npt.NDArray[np.float16]) -> F32:
    """[n] halves -> [n, 1] float32."""
    return x.astype(np.float32)[:, None]


def _quantize_symmetric(x: F32, b: Blocks, half: int) -> Ints:
    """q of x = d * (q - half): the value of the largest magnitude becomes q = 0 exactly."""
    largest = np.take_along_axis(x, np.abs(x).argmax(axis=1, keepdims=True), axis=1)
    d = largest / np.float32(-half)
    b["d"] = f32_to_f16(d[:, 0])
    q: F32 = np.minimum(x * _inverse(d) + np.float32(half + 0.5), 2 * half - 1)
    return q.astype(np.uint8)


def _quantize_affine(x: F32, b: Blocks, steps: int) -> Ints:
    """q of x = d * q + m: the least value becomes 0, the greatest `steps`."""
    low = x.min(axis=1, keepdims=True)
    d = (x.max(axis=1, keepdims=True) - low) / np.float32(steps)
    b["d"], b["m"] = f32_to_f16(d[:, 0]), f32_to_f16(low[:, 0])
    q: F32 = np.minimum((x - low) * _inverse(d) + np.float32(0.5), steps)
    return q.astype(np.uint8)


def _dequantize_q4_0(b: Blocks) -> F32:
    return _column(b["d"]) * (_split_nibbles(b["qs"]).astype(np.float32) - 8)


def _quantize_q4_0(x: F32, b: Blocks) -> None:
    b["qs"] = _join_nibbles(_quantize_symmetric(x, b, 8))


def _dequantize_q4_1(b: Blocks) -> F32:
    return _column(b["d"]) * _split_nibbles(b["qs"]).astype(np.float32) + _column(b["m"])


def _quantize_q4_1(x: F32, b: Blocks) -> None:
    b["qs"] = _join_nibbles(_quantize_affine(x, b, 15))


def _dequantize_q5_0(b: Blocks) -> F32:
    return _column(b["d"]) * (_split_fives(b).astype(np.float32) - 16)


def _quantize_q5_0(x: F32, b: Blocks) -> None:
    _join_fives(b, _quantize_symmetric(x, b, 16))


def _dequantize_q5_1(b: Blocks) -> F32:
    return _column(b["d"]) * _split_fives(b).astype(np.float32) + _column(b["m"])


def _quantize_q5_1(x: F32, b: Blocks) -> None:
    _join_fives(b, _quantize_affine(x, b, 31))


def _dequantize_q8_0(b: Blocks) -> F32:
    return _column(b["d"]) * b["qs"].astype(np.float32)


def _quantize_q8_0(x: F32, b: Blocks) -> None:
    d = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    scaled = x * _inverse(d)
    b["d"] = f32_to_f16(d[:, 0])
    b["qs"] = np.copysign(np.floor(np.abs(scaled) + np.float32(0.5)), scaled)  # halves away from zero


def _dequantize_float(b: Blocks) -> F32:
    x: F32 = b["x"].astype(np.float32)
    return x


def _quantize_float(x: F32, b: Blocks) -> None:
    with np.errstate(over="ignore"):
        b["x"] = x


def _dequantize_bf16(b: Blocks) -> F32:
    return bf16_to_f32(b["x"])


def _quantize_bf16(x: F32, b: Blocks) -> None:
    b["x"] = f32_to_bf16(x)


@dataclass(frozen=True)
class _Row:
    """A weight type: values per block, the block as a struct, and both ways if Pelton computes with it."""

    block: int
    struct: np.dtype[Any]
    dequantize: Callable[[Blocks], F32] | None = None
    quantize: Callable[[F32, Blocks], None] | None = None


def _opaque(num_bytes: int) -> _Row:
    """A type that files may hold and Pelton does not compute with."""
    return _Row(1, np.dtype([("bytes", "u1", num_bytes)]))


_HALF = ("d", "<f2")
_MINIMUM = ("m", "<f2")
_ROWS: dict[WeightType, _Row] = {
    WeightType.F32: _Row(1, np.dtype([("x", "<f4", (1,))]), _dequantize_float, _quantize_float),
    WeightType.F16: _Row(1, np.dtype([("x", "<f2", (1,))]), _dequantize_float, _quantize_float),
    WeightType.BF16: _Row(1, np.dtype([("x", "<u2", (1,))]), _dequantize_bf16, _quantize_bf16),
    WeightType.Q4_0: _Row(32, np.dtype([_HALF, ("qs", "u1", 16)]), _dequantize_q4_0, _quantize_q4_0),
    WeightType.Q4_1: _Row(32, np.dtype([_HALF, _MINIMUM, ("qs", "u1", 16)]), _dequantize_q4_1, _quantize_q4_1),
    WeightType.Q5_0: _Row(32, np.dtype([_HALF, ("qh", "u1", 4), ("qs", "u1", 16)]), _dequantize_q5_0, _quantize_q5_0),
    WeightType.Q5_1: _Row(
        32, np.dtype([_HALF, _MINIMUM, ("qh", "u1", 4), ("qs", "u1", 16)]), _dequantize_q5_1, _quantize_q5_1
    ),
    WeightType.Q8_0: _Row(32, np.dtype([_HALF, ("qs", "i1", 32)]), _dequantize_q8_0, _quantize_q8_0),
    WeightType.Q2_K: _Row(256, kquants.Q2_K, kquants.dequantize_q2_k, kquants.quantize_q2_k),
    WeightType.Q3_K: _Row(256, kquants.Q3_K, kquants.dequantize_q3_k, kquants.quantize_q3_k),
    WeightType.Q4_K: _Row(256, kquants.Q4_K, kquants.dequantize_q4_k, kquants.quantize_q4_k),
    WeightType.Q5_K: _Row(256, kquants.Q5_K, kquants.dequantize_q5_k, kquants.quantize_q5_k),
    WeightType.Q6_K: _Row(256, kquants.Q6_K, kquants.dequantize_q6_k, kquants.quantize_q6_k),
    WeightType.IQ4_NL: _Row(32, iq4.IQ4_NL, iq4.dequantize_nl, iq4.quantize_nl),
    WeightType.IQ4_XS: _Row(256, iq4.IQ4_XS, iq4.dequantize_xs, iq4.quantize_xs),
    WeightType.I8: _opaque(1),
    WeightType.I16: _opaque(2),
    WeightType.I32: _opaque(4),
    WeightType.I64: _opaque(8),
    WeightType.F64: _opaque(8),
}


def is_supported(type: WeightType) -> bool:
    """Whether Pelton can compute with weights of this type, not only name it."""
    return _ROWS[type].dequantize is not None


def block_size(type: WeightType) -> int:
    """Values per block."""
    return _ROWS[type].block


def block_bytes(type: WeightType) -> int:
    """Bytes per block."""
    return _ROWS[type].struct.itemsize


def row_bytes(type: WeightType, K: int) -> int:
    """Bytes of a row of K values. Raises ValueError where K is no multiple of the block."""
    row = _ROWS[type]
    if K % row.block:
        raise ValueError(f"rows of {K} values are no multiple of {type.name}'s block of {row.block}")
    return K // row.block * row.struct.itemsize


def as_blocks(type: WeightType, data: U8) -> Blocks:
    """File bytes [rows, row_bytes] -> [rows, blocks] of the type's struct, a view where `data` is contiguous."""
    return np.ascontiguousarray(data).view(_ROWS[type].struct)


def dequantize(type: WeightType, data: U8) -> F32:
    """File bytes [rows, row_bytes] -> float32 [rows, K]. Raises UnsupportedModel for a type without codec."""
    row = _ROWS[type]
    if row.dequantize is None:
        raise UnsupportedModel(f"weights of type {type.name} are not supported")
    with np.errstate(over="ignore", invalid="ignore"):  # hostile scales: infinities and NaN are values like others
        return row.dequantize(as_blocks(type, data).reshape(-1)).reshape(data.shape[0], -1)


def quantize(type: WeightType, x: npt.ArrayLike) -> U8:
    """Finite float32 [rows, K] -> file bytes [rows, row_bytes]. UnsupportedModel for a type without codec."""
    row = _ROWS[type]
    if row.quantize is None:
        raise UnsupportedModel(f"weights of type {type.name} are not supported")
    values = np.ascontiguousarray(x, np.float32)
    width = row_bytes(type, values.shape[1])
    blocks = np.zeros(values.size // row.block, row.struct)
    row.quantize(values.reshape(-1, row.block), blocks)
    return blocks.view(np.uint8).reshape(values.shape[0], width)
