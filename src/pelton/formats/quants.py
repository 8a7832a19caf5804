"""One row per weight type: block length, block bytes, and NumPy both ways.

The layouts are those of GGML (ggml-common.h, ggml-quants.c of llama.cpp), little-endian.
"""

from __future__ import annotations

from enum import IntEnum


class WeightType(IntEnum):
    """Weight types by their GGML id, as GGUF files store it."""

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
    BF16 = 30
