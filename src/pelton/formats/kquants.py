"""The K-quants: super-blocks of 256 values with quantised scales. `quants` has them in its table.

Each function takes or fills an [n] array of a type's block struct. Values stand in the order of the row;
where a layout interleaves (planes of bits over runs of 32 or 64), the reshapes say how.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.integer[Any]]
"""Small non-negative integers, held as uint8."""
F32 = npt.NDArray[np.float32]
Blocks = npt.NDArray[Any]

Q2_K = np.dtype([("scales", "u1", 16), ("qs", "u1", 64), ("d", "<f2"), ("dmin", "<f2")])
Q3_K = np.dtype([("hmask", "u1", 32), ("qs", "u1", 64), ("scales", "u1", 12), ("d", "<f2")])
Q4_K = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qs", "u1", 128)])
Q5_K = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)])
Q6_K = np.dtype([("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", "<f2")])


def _column(x: npt.NDArray[np.float16]) -> F32:
    """[n] halves -> [n, 1] float32."""
    return x.astype(np.float32)[:, None]


def _split_planes(packed: Ints, run: int, bits: int) -> Ints:
    """[n, B] bytes -> [n, 256] values of `bits` bits.

    Bytes come in runs: the lowest bits of a run's bytes are its first `run` values, the next bits the next.
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    planes = packed.reshape(len(packed), -1, 1, run) >> shifts
    return (planes & np.uint8((1 << bits) - 1)).reshape(len(packed), 256)


def _join_planes(q: Ints, run: int, bits: int) -> Ints:
    """The inverse of `_split_planes`; bits above are dropped."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    planes = q.reshape(len(q), -1, 8 // bits, run) & np.uint8((1 << bits) - 1)
    packed: Ints = np.bitwise_or.reduce(planes << shifts, axis=2)
    return packed.reshape(len(packed), -1)


def _split_scales(packed: Ints) -> tuple[Ints, Ints]:
    """12 bytes -> 8 scales and 8 minima of 6 bits, [n, 8] each (Q4_K, Q5_K).

    Bytes 0-3 hold scales 0-3 and in their top bits the top bits of scales 4-7, bytes 4-7 the same of the
    minima, bytes 8-11 the low nibbles of scales 4-7 (low) and minima 4-7 (high).
    """
    a, b, c = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([a & 63, (c & 15) | ((a >> 6) << 4)], axis=1)
    minima = np.concatenate([b & 63, (c >> 4) | ((b >> 6) << 4)], axis=1)
    return scales, minima


def _join_scales(scales: Ints, minima: Ints) -> Ints:
    s, t, m, k = scales[:, :4], scales[:, 4:], minima[:, :4], minima[:, 4:]
    return np.concatenate([s | ((t >> 4) << 6), m | ((k >> 4) << 6), (t & 15) | ((k & 15) << 4)], axis=1)


def _inverse(d: F32) -> F32:
    """1/d, and 0 where d is 0."""
    return np.divide(np.float32(1), d, out=np.zeros_like(d), where=d != 0)


def _round(x: F32, low: int, high: int) -> F32:
    return np.clip(np.rint(x), low, high)


def _scale_affine(x: F32, b: Blocks, steps: int, limit: int) -> tuple[Ints, Ints, Ints]:
    """Fills `d` and `dmin`; returns scales, minima [n, S] (0..limit) and q [n, S, width] (0..steps).

    x [n, S, width] = d * scale * q - dmin * minimum per sub-block.
    """
    low = np.minimum(x.min(axis=2), 0)
    span = (x.max(axis=2) - low) / np.float32(steps)
    b["d"], b["dmin"] = span.max(axis=1) / np.float32(limit), -low.min(axis=1) / np.float32(limit)
    d, dmin = _column(b["d"]), _column(b["dmin"])
    scales, minima = _round(span * _inverse(d), 0, limit), _round(-low * _inverse(dmin), 0, limit)
    q = _round((x + (dmin * minima)[..., None]) * _inverse(d * scales)[..., None], 0, steps)
    return scales.astype(np.uint8), minima.astype(np.uint8), q.astype(np.uint8)


def _scale_symmetric(x: F32, b: Blocks, half: int, limit: int) -> tuple[npt.NDArray[np.int8], Ints]:
    """Fills `d`; returns scales [n, S] (-limit..limit-1) and q + half [n, S, width]; x = d * scale * q."""
    largest = np.take_along_axis(x, np.abs(x).argmax(axis=2, keepdims=True), axis=2)[..., 0]
    step = largest / np.float32(-half)
    b["d"] = np.take_along_axis(step, np.abs(step).argmax(axis=1, keepdims=True), axis=1)[:, 0] / np.float32(-limit)
    d = _column(b["d"])
    scales = _round(step * _inverse(d), -limit, limit - 1)
    q = _round(x * _inverse(d * scales)[..., None], -half, half - 1) + half
    return scales.astype(np.int8), q.astype(np.uint8)


def dequantize_q2_k(b: Blocks) -> F32:
    """[n] blocks -> [n, 256]: 16 sub-blocks of 16, 4-bit scales and minima."""
    q = _split_planes(b["qs"], run=32, bits=2).reshape(-1, 16, 16).astype(np.float32)
    scales = _column(b["d"]) * (b["scales"] & 15).astype(np.float32)
    minima = _column(b["dmin"]) * (b["scales"] >> 4).astype(np.float32)
    return (scales[..., None] * q - minima[..., None]).reshape(-1, 256)


def quantize_q2_k(x: F32, b: Blocks) -> None:
    """[n, 256] -> [n] blocks."""
    scales, minima, q = _scale_affine(x.reshape(-1, 16, 16), b, steps=3, limit=15)
    b["scales"] = scales | (minima << 4)
    b["qs"] = _join_planes(q, run=32, bits=2)


def dequantize_q3_k(b: Blocks) -> F32:
    """[n] blocks -> [n, 256]: 16 sub-blocks of 16, 6-bit signed scales.

    The third bit of a value stands in `hmask`, the low nibbles of the scales in bytes 0-7 of `scales`, their
    top bits in bytes 8-11.
    """
    low, high = b["scales"][:, :8], b["scales"][:, 8:]
    nibbles: Ints = np.concatenate([low & 15, low >> 4], axis=1)
    tops: Ints = np.concatenate([(high >> shift) & 3 for shift in (0, 2, 4, 6)], axis=1)
    scales: F32 = _column(b["d"]) * ((nibbles | (tops << 4)).astype(np.float32) - 32)
    q = _split_planes(b["qs"], run=32, bits=2) | (_split_planes(b["hmask"], run=32, bits=1) << 2)
    return (scales[..., None] * (q.reshape(-1, 16, 16).astype(np.float32) - 4)).reshape(-1, 256)


def quantize_q3_k(x: F32, b: Blocks) -> None:
    """[n, 256] -> [n] blocks."""
    signed, q = _scale_symmetric(x.reshape(-1, 16, 16), b, half=4, limit=32)
    scales = (signed + 32).astype(np.uint8)
    tops = np.bitwise_or.reduce([(scales[:, 4 * i : 4 * i + 4] >> 4) << (2 * i) for i in range(4)], axis=0)
    b["scales"] = np.concatenate([(scales[:, :8] & 15) | ((scales[:, 8:] & 15) << 4), tops], axis=1)
    b["qs"] = _join_planes(q, run=32, bits=2)
    b["hmask"] = _join_planes(q >> 2, run=32, bits=1)


def _dequantize_affine(b: Blocks, q: Ints) -> F32:
    """Eight sub-blocks of 32 with 6-bit scales and minima."""
    scales, minima = _split_scales(b["scales"])
    scale = _column(b["d"]) * scales.astype(np.float32)
    minimum = _column(b["dmin"]) * minima.astype(np.float32)
    return (scale[..., None] * q.reshape(-1, 8, 32).astype(np.float32) - minimum[..., None]).reshape(-1, 256)


def dequantize_q4_k(b: Blocks) -> F32:
    """[n] blocks -> [n, 256]: 8 sub-blocks of 32, 6-bit scales and minima."""
    return _dequantize_affine(b, _split_planes(b["qs"], run=32, bits=4))


def quantize_q4_k(x: F32, b: Blocks) -> None:
    """[n, 256] -> [n] blocks."""
    scales, minima, q = _scale_affine(x.reshape(-1, 8, 32), b, steps=15, limit=63)
    b["scales"] = _join_scales(scales, minima)
    b["qs"] = _join_planes(q, run=32, bits=4)


def dequantize_q5_k(b: Blocks) -> F32:
    """[n] blocks -> [n, 256]: as Q4_K, with the fifth bit of a value in `qh`."""
    high = _split_planes(b["qh"], run=32, bits=1)
    return _dequantize_affine(b, _split_planes(b["qs"], run=32, bits=4) | (high << 4))


def quantize_q5_k(x: F32, b: Blocks) -> None:
    """[n, 256] -> [n] blocks."""
    scales, minima, q = _scale_affine(x.reshape(-1, 8, 32), b, steps=31, limit=63)
    b["scales"] = _join_scales(scales, minima)
    b["qs"] = _join_planes(q, run=32, bits=4)
    b["qh"] = _join_planes(q >> 4, run=32, bits=1)


def dequantize_q6_k(b: Blocks) -> F32:
    """[n] blocks -> [n, 256]: 16 sub-blocks of 16, 8-bit scales; low nibbles in `ql`, top bits in `qh`."""
    q = _split_planes(b["ql"], run=64, bits=4) | (_split_planes(b["qh"], run=32, bits=2) << 4)
    scales = _column(b["d"]) * b["scales"].astype(np.float32)
    return (scales[..., None] * (q.reshape(-1, 16, 16).astype(np.float32) - 32)).reshape(-1, 256)


def quantize_q6_k(x: F32, b: Blocks) -> None:
    """[n, 256] -> [n] blocks."""
    b["scales"], q = _scale_symmetric(x.reshape(-1, 16, 16), b, half=32, limit=128)
    b["ql"] = _join_planes(q, run=64, bits=4)
    b["qh"] = _join_planes(q >> 4, run=32, bits=2)
