"""What this machine can do at most: the figures that measurements are held against."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from pelton import _core

TILE_ROWS = 16
READ_BYTES = 64 << 20
"""More than a last-level cache holds, on most machines."""


@dataclass(frozen=True)
class Times:
    """Of the runs of one measurement, in seconds."""

    median: float
    best: float


@dataclass(frozen=True)
class Limits:
    """Of all threads together: bytes per second from memory, operations per second in registers."""

    read: float
    int8: float
    float32: float
    bf16: float | None = None
    """Of the tile unit; None where there is none."""


class Threads:
    """Calls a function once per thread, at once."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool = ThreadPoolExecutor(count)

    def measure(self, part: Callable[[int], object], seconds: float) -> Times:
        """Times part(0) .. part(count - 1) together, as `measure` does."""
        if self.count == 1:
            return measure(lambda: part(0), seconds)
        return measure(lambda: list(self._pool.map(part, range(self.count))), seconds)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


def measure(run: Callable[[], object], seconds: float) -> Times:
    """Times run() again and again for so long, at least three times."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return Times(statistics.median(times), min(times))


def measure_read(isa: str, threads: Threads, num_bytes: int, seconds: float) -> float:
    """Bytes per second that all threads together read from memory, each a part of `num_bytes`."""
    core = _core.Limits(isa)
    share = num_bytes // threads.count // 256 * 256
    data = [np.ones(share, np.uint8) for _ in range(threads.count)]
    times = threads.measure(lambda i: core.read(data[i]), seconds)
    return share * threads.count / times.best


def measure_limits(isa: str, threads: Threads, num_bytes: int, seconds: float) -> Limits:
    """Read bandwidth over `num_bytes`, and the peak of each kind of arithmetic; `seconds` for each.

    Raises ValueError for an instruction set that is not here.
    """
    core = _core.Limits(isa)
    num_dots, num_columns = _worth_timing(core.int8_dots), _worth_timing(core.float_products)
    int8 = threads.measure(lambda i: core.int8_dots(num_dots), seconds)
    float32 = threads.measure(lambda i: core.float_products(num_columns), seconds)
    return Limits(
        read=measure_read(isa, threads, num_bytes, seconds),
        int8=2 * TILE_ROWS * 32 * num_dots * threads.count / int8.best,
        float32=2 * TILE_ROWS * 4 * num_columns * threads.count / float32.best,
        bf16=_measure_tiles(core, threads, seconds) if core.has_tiles else None,
    )


def _measure_tiles(core: _core.Limits, threads: Threads, seconds: float) -> float:
    num_steps = _worth_timing(core.bf16_products)
    times = threads.measure(lambda i: core.bf16_products(num_steps), seconds)
    return 2 * TILE_ROWS * TILE_ROWS * 32 * num_steps * threads.count / times.best


def _worth_timing(work: Callable[[int], object]) -> int:
    """A count for which work(count) takes a few milliseconds."""
    count, elapsed = 1 << 8, 0.0
    while elapsed < 0.002:
        count *= 2
        start = time.perf_counter()
        work(count)
        elapsed = time.perf_counter() - start
    return count
