"""The 4-bit types whose codes name the entries of a table: IQ4_NL (blocks of 32) and IQ4_XS (super-blocks of 256).

The table's steps are finer near zero, where most weights lie. `quants` has these types in its table; layouts are
GGML's. Quantising takes the plainest scale, without llama.cpp's search for better ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Codes = npt.NDArray[np.integer[Any]]
"""0..15, held as uint8."""
F32 = npt.NDArray[np.float32]
Blocks = npt.NDArray[Any]

IQ4_NL = np.dtype([("d", "<f2"), ("qs", "u1", 16)])
IQ4_XS = np.dtype([("d", "<f2"), ("scales_h", "<u2"), ("scales_l", "u1", 4), ("qs", "u1", 128)])

VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
_BORDERS = (VALUES[:-1] + VALUES[1:]) / 2


def _split(qs: Codes) -> F32:
    """[..., 16] bytes -> values [..., 32]: the low nibbles are the first half."""
    values: F32 = VALUES[np.concatenate([qs & 15, qs >> 4], axis=-1)]
    return values


def _join(codes: Codes) -> Codes:
    """[..., 32] -> [..., 16]."""
    return codes[..., :16] | (codes[..., 16:] << 4)


def _nearest(x: F32, step: F32) -> Codes:
    """Codes of x [..., 32] in multiples of step [...]; where the step is 0, that of the value nearest to 0."""
    inverse = np.divide(np.float32(1), step, out=np.zeros_like(step), where=step != 0)
    return np.searchsorted(_BORDERS, x * inverse[..., None]).astype(np.uint8)


def _steps(x: F32) -> F32:
    """[..., 32] -> [...]: such that the value of the largest magnitude meets the table's first."""
    largest = np.take_along_axis(x, np.abs(x).argmax(axis=-1, keepdims=True), axis=-1)[..., 0]
    steps: F32 = largest / VALUES[0]
    return steps


def dequantize_nl(b: Blocks) -> F32:
    """[n] blocks -> [n, 32]."""
    values: F32 = b["d"].astype(np.float32)[:, None] * _split(b["qs"])
    return values


def quantize_nl(x: F32, b: Blocks) -> None:
    """[n, 32] -> [n] blocks."""
    b["d"] = _steps(x)
    b["qs"] = _join(_nearest(x, b["d"].astype(np.float32)))


def _scales(b: Blocks) -> F32:
    """The 6-bit scales [n, 8], -32..31: low nibbles two a byte, the upper pairs in one word."""
    low = np.stack([b["scales_l"] & 15, b["scales_l"] >> 4], axis=-1).reshape(-1, 8)
    high = (b["scales_h"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16)) & 3
    scales: F32 = (low | (high << 4)).astype(np.float32) - 32
    return scales


def dequantize_xs(b: Blocks) -> F32:
    """[n] blocks -> [n, 256]: 8 sub-blocks of 32."""
    steps: F32 = b["d"].astype(np.float32)[:, None] * _scales(b)
    return (steps[..., None] * _split(b["qs"].reshape(-1, 8, 16))).reshape(-1, 256)


def quantize_xs(x: F32, b: Blocks) -> None:
    """[n, 256] -> [n] blocks."""
    parts = x.reshape(-1, 8, 32)
    steps = _steps(parts)
    largest = np.take_along_axis(steps, np.abs(steps).argmax(axis=1, keepdims=True), axis=1)
    b["d"] = largest[:, 0] / -32
    d = b["d"].astype(np.float32)[:, None]
    inverse = np.divide(np.float32(1), d, out=np.zeros_like(d), where=d != 0)
    scales = (np.clip(np.rint(steps * inverse), -32, 31) + 32).astype(np.uint16)
    b["scales_l"] = (scales[:, 0::2] & 15) | ((scales[:, 1::2] & 15) << 4)
    b["scales_h"] = np.bitwise_or.reduce((scales >> 4) << np.arange(0, 16, 2, dtype=np.uint16), axis=1)
    b["qs"] = _join(_nearest(parts, d * _scales(b))).reshape(-1, 128)
