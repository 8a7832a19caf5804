"""Linear kernels, by weight type and number of activation rows.

A row of weights must be read once at least, so few activation rows are limited by memory; many are limited by the
arithmetic. Threads split the tiles as the engine's do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pelton import _core
from pelton.bench.limits import TILE_ROWS, Limits, Threads
from pelton.bench.result import Result, judge
from pelton.formats import quants
from pelton.formats.quants import WeightType

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]

FEW_ROWS = 4
"""Up to so many rows a product streams all its weights: it is about memory."""
SAMPLE_SECONDS = 0.004
FAMILIES = ("float32", "int8", "bf16")
DEFAULT_TYPES = (
    WeightType.Q4_0,
    WeightType.Q4_1,
    WeightType.Q5_0,
    WeightType.Q8_0,
    WeightType.Q4_K,
    WeightType.Q6_K,
    WeightType.IQ4_NL,
    WeightType.IQ4_XS,
    WeightType.BF16,
    WeightType.F32,
)


@dataclass(frozen=True)
class Products:
    """Products to measure: each type at each number of activation rows, over `columns` columns."""

    types: Sequence[WeightType] = DEFAULT_TYPES
    num_rows: Sequence[int] = (1, 4, 16, 64, 512)
    columns: int = 2048


def measure_type(
    products: Products, type: WeightType, isa: str, threads: Threads, num_bytes: int, seconds: float, limits: Limits
) -> list[Result]:
    """One type at every number of rows, over weights of `num_bytes`. No results where the instruction set has no
    kernel for the type."""
    try:
        kernel = _core.LinearKernel(isa, type)
    except ValueError:
        return []
    K = products.columns
    rng = np.random.default_rng(0)
    one_tile = quants.quantize(type, 0.05 * rng.standard_normal((TILE_ROWS, K)).astype(np.float32))
    tile_bytes = kernel.tile_bytes(K)
    tiles_each = max(1, num_bytes // tile_bytes // threads.count)
    weights = [kernel.pack(np.tile(one_tile, (tiles_each, 1)), K) for _ in range(threads.count)]
    family = FAMILIES[kernel.family]
    peak = {"int8": limits.int8, "float32": limits.float32, "bf16": limits.bf16}[family]
    results = []
    for M in products.num_rows:
        used = tiles_each
        if M > FEW_ROWS:  # many rows take long: a few milliseconds of them tell as much
            used = min(used, max(1, int(SAMPLE_SECONDS * limits.int8 / threads.count / (2 * M * TILE_ROWS * K))))
        act = kernel.prepare(rng.standard_normal((M, K)).astype(np.float32))
        outs = [np.zeros((M, used * TILE_ROWS), np.float32) for _ in range(threads.count)]

        def part(i: int, act: U8 = act, outs: list[F32] = outs, used: int = used) -> None:
            kernel.run(weights[i], act, K, outs[i], 0, used)

        times = threads.measure(part, seconds)
        num_tiles = used * threads.count
        results.append(
            judge(
                "linear",
                f"{type.name}, {family}",
                M,
                times,
                num_bytes=num_tiles * tile_bytes,
                operations=2 * M * num_tiles * TILE_ROWS * K,
                limits=limits,
                peak=peak,
            )
        )
    return results
