"""One op's measurement, judged against the machine's limits."""

from __future__ import annotations

from dataclasses import dataclass

from pelton.bench.limits import Limits, Times


@dataclass(frozen=True)
class Result:
    """One op over `num_rows` rows, by the median time; `best_share` is that of the fastest run, which says what the
    op can do where other work on the machine disturbs the median."""

    op: str
    subject: str
    """What the op worked on: a weight type, a model's heads, a vocabulary."""
    num_rows: int
    seconds: float
    bytes_per_second: float
    operations_per_second: float
    """Multiplications and additions, each counted; 0 where the op's own work is neither."""
    limit: str
    share: float
    best_share: float


def judge(
    op: str,
    subject: str,
    num_rows: int,
    times: Times,
    *,
    num_bytes: int,
    operations: int,
    limits: Limits,
    peak: float | None,
) -> Result:
    """An op that must read so many bytes from memory at least and do so many operations, of which the machine can do
    `peak` per second (None: not measured). The limit is what would take longer at full speed."""
    least_times = {"memory": num_bytes / limits.read}
    if peak is not None:
        least_times["arithmetic"] = operations / peak
    limit = max(least_times, key=lambda name: least_times[name])
    return Result(
        op=op,
        subject=subject,
        num_rows=num_rows,
        seconds=times.median,
        bytes_per_second=num_bytes / times.median,
        operations_per_second=operations / times.median,
        limit=limit,
        share=least_times[limit] / times.median,
        best_share=least_times[limit] / times.best,
    )
