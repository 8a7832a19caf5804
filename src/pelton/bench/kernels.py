"""Each linear kernel against this machine's limit, measured in the same run.

One row of weights must at least be read once, so few activation rows are limited by memory; many are limited by the
arithmetic. A result's share is of whichever limit allows less. Weights are as large as a real model's layer stack, so
that they come from memory and not from a cache; threads split the tiles as the engine's do.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from pelton import _core
from pelton.formats import quants
from pelton.formats.quants import WeightType

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]

TILE_ROWS = 16
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
    WeightType.BF16,
    WeightType.F32,
)


@dataclass(frozen=True)
class Options:
    """What to measure. `seconds` is per point; `weight_bytes` the size of the weights that one product streams."""

    isa: str = ""
    num_threads: int = 1
    types: Sequence[WeightType] = DEFAULT_TYPES
    num_rows: Sequence[int] = (1, 4, 16, 64, 512)
    columns: int = 2048
    weight_bytes: int = 64 << 20
    seconds: float = 0.3


@dataclass(frozen=True)
class Limits:
    """Of all threads together: bytes per second from memory, operations per second in registers."""

    read: float
    int8: float
    float32: float


@dataclass(frozen=True)
class Result:
    """One kernel at one number of activation rows, by the median time; `best_share` is that of the fastest run, which
    says what the kernel can do where other work on the machine disturbs the median."""

    type: WeightType
    family: str
    num_rows: int
    seconds: float
    bytes_per_second: float
    operations_per_second: float
    limit: str
    share: float
    best_share: float


@dataclass(frozen=True)
class Times:
    """Of the runs of one measurement, in seconds."""

    median: float
    best: float


class Threads:
    """Calls a function once per thread, at once."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool = ThreadPoolExecutor(count)

    def measure(self, part: Callable[[int], object], seconds: float) -> Times:
        """Times part(0) .. part(count - 1) together, over at least three runs."""
        times: list[float] = []
        end = time.perf_counter() + seconds
        while len(times) < 3 or time.perf_counter() < end:
            start = time.perf_counter()
            if self.count == 1:
                part(0)
            else:
                list(self._pool.map(part, range(self.count)))
            times.append(time.perf_counter() - start)
        return Times(statistics.median(times), min(times))

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


def _worth_timing(work: Callable[[int], object]) -> int:
    """A count for which work(count) takes a few milliseconds."""
    count, elapsed = 1 << 8, 0.0
    while elapsed < 0.002:
        count *= 2
        start = time.perf_counter()
        work(count)
        elapsed = time.perf_counter() - start
    return count


def measure_limits(options: Options, threads: Threads) -> Limits:
    """Read bandwidth over as many bytes as the weights have, and the peak of both kinds of arithmetic."""
    core = _core.Limits(options.isa)
    share = options.weight_bytes // threads.count // 256 * 256
    data = [np.ones(share, np.uint8) for _ in range(threads.count)]
    num_dots, num_columns = _worth_timing(core.int8_dots), _worth_timing(core.float_products)
    read = threads.measure(lambda i: core.read(data[i]), options.seconds)
    int8 = threads.measure(lambda i: core.int8_dots(num_dots), options.seconds)
    float32 = threads.measure(lambda i: core.float_products(num_columns), options.seconds)
    return Limits(
        read=share * threads.count / read.best,
        int8=2 * TILE_ROWS * 32 * num_dots * threads.count / int8.best,
        float32=2 * TILE_ROWS * 4 * num_columns * threads.count / float32.best,
    )


def measure_kernel(options: Options, threads: Threads, limits: Limits, type: WeightType) -> list[Result]:
    """One type at every number of rows. No results where the instruction set has no kernel for the type."""
    try:
        kernel = _core.LinearKernel(options.isa, type)
    except ValueError:
        return []
    K = options.columns
    rng = np.random.default_rng(0)
    one_tile = quants.quantize(type, 0.05 * rng.standard_normal((TILE_ROWS, K)).astype(np.float32))
    tile_bytes = kernel.tile_bytes(K)
    tiles_each = max(1, options.weight_bytes // tile_bytes // threads.count)
    weights = [kernel.pack(np.tile(one_tile, (tiles_each, 1)), K) for _ in range(threads.count)]
    results = []
    for M in options.num_rows:
        used = tiles_each
        if M > FEW_ROWS:  # many rows take long: a few milliseconds of them tell as much
            used = min(used, max(1, int(SAMPLE_SECONDS * limits.int8 / threads.count / (2 * M * TILE_ROWS * K))))
        act = kernel.prepare(rng.standard_normal((M, K)).astype(np.float32))
        outs = [np.zeros((M, used * TILE_ROWS), np.float32) for _ in range(threads.count)]

        def part(i: int, act: U8 = act, outs: list[F32] = outs, used: int = used) -> None:
            kernel.run(weights[i], act, K, outs[i], 0, used)

        times = threads.measure(part, options.seconds)
        results.append(_judge(type, FAMILIES[kernel.family], M, times, used * threads.count, tile_bytes, K, limits))
    return results


def _judge(
    type: WeightType, family: str, M: int, times: Times, num_tiles: int, tile_bytes: int, K: int, limits: Limits
) -> Result:
    num_bytes, operations = num_tiles * tile_bytes, 2 * M * num_tiles * TILE_ROWS * K
    least_times = {"memory": num_bytes / limits.read}
    peaks = {"int8": limits.int8, "float32": limits.float32}
    if family in peaks:  # the tile unit's own peak is not measured
        least_times["arithmetic"] = operations / peaks[family]
    limit = max(least_times, key=lambda name: least_times[name])
    return Result(
        type=type,
        family=family,
        num_rows=M,
        seconds=times.median,
        bytes_per_second=num_bytes / times.median,
        operations_per_second=operations / times.median,
        limit=limit,
        share=least_times[limit] / times.median,
        best_share=least_times[limit] / times.best,
    )


def run(options: Options) -> tuple[Limits, list[Result]]:
    """Measure everything that `options` names. Raises ValueError for an instruction set that is not here."""
    threads = Threads(options.num_threads)
    try:
        limits = measure_limits(options, threads)
        results = [r for type in options.types for r in measure_kernel(options, threads, limits, type)]
    finally:
        threads.close()
    return limits, results


def print_table(options: Options, limits: Limits, results: Sequence[Result], console: Console | None = None) -> None:
    """The limits, and one line per kernel and number of rows."""
    console = console or Console()
    isa = options.isa or _core.isas()[-1]
    table = Table(
        title=f"{isa}, {options.num_threads} thread(s), K = {options.columns}",
        caption=f"limits: read {limits.read / 1e9:.1f} GB/s, int8 {limits.int8 / 1e9:.0f} GOP/s, "
        f"float32 {limits.float32 / 1e9:.0f} GFLOP/s",
    )
    for name in ("type", "family", "rows", "time (ms)", "GB/s", "GOP/s", "limit", "share", "best"):
        table.add_column(name, justify="left" if name in {"type", "family", "limit"} else "right")
    for r in results:
        table.add_row(
            r.type.name,
            r.family,
            str(r.num_rows),
            f"{1e3 * r.seconds:.2f}",
            f"{r.bytes_per_second / 1e9:.1f}",
            f"{r.operations_per_second / 1e9:.0f}",
            r.limit,
            f"{100 * r.share:.0f} %",
            f"{100 * r.best_share:.0f} %",
        )
    console.print(table)


def main(options: Options) -> None:
    """Measure and print."""
    limits, results = run(options)
    print_table(options, limits, results)
