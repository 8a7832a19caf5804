"""Each op against this machine's limits, measured in the same run.

What an op works on is as large as a real model's layers together, so that it comes from memory and not from a cache. A
result's share is of whichever limit, memory or arithmetic, allows less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from pelton import _core
from pelton.bench.attention import Attention, measure_heads
from pelton.bench.limits import READ_BYTES, Limits, Threads, measure, measure_limits
from pelton.bench.linear import Products, measure_type
from pelton.bench.result import Result
from pelton.bench.sampling import Sampling, measure_vocabulary
from pelton.errors import ConfigError
from pelton.formats.quants import WeightType

TABLE_WIDTH = 120
"""Also where the terminal is narrower, or a file: columns that are cut say nothing."""
MEETINGS = 1000
"""Per measurement of the threads."""


@dataclass(frozen=True)
class Options:
    """What to measure. `seconds` is per line of the table; `num_bytes` what one run streams where memory is the
    limit."""

    isa: str = ""
    num_threads: int = 1
    linear: Products = field(default_factory=Products)
    attention: Attention = field(default_factory=Attention)
    sampling: Sampling = field(default_factory=Sampling)
    threads: bool = False
    """Also what handing out work to the threads and waiting for them takes."""
    num_bytes: int = READ_BYTES
    seconds: float = 0.3


def check_isa(isa: str) -> None:
    """Raises ConfigError for an instruction set that is not here. "": the best that is."""
    isas = _core.isas()
    if isa and isa not in isas:
        raise ConfigError(f"isa: there is no {isa!r} here; this CPU has: {', '.join(isas)}", param="isa")


def types_named(names: Sequence[str], isa: str) -> list[WeightType]:
    """Weight types by name. Raises ConfigError where the instruction set has no kernel for one."""
    check_isa(isa)
    machine = _core.Machine(isa, 1)
    have = {type.name: type for type in WeightType if machine.family(type) >= 0}
    for name in names:
        if name.upper() not in have:
            raise ConfigError(f"type: no kernel multiplies {name!r}; there is: {', '.join(have)}", param="type")
    return [have[name.upper()] for name in names]


def run(options: Options) -> tuple[Limits, list[Result]]:
    """Measure everything that `options` names. Raises ConfigError for an instruction set that is not here."""
    check_isa(options.isa)
    threads = Threads(options.num_threads)
    try:
        limits = measure_limits(options.isa, threads, options.num_bytes, options.seconds)
        return limits, list(_measure(options, threads, limits))
    finally:
        threads.close()


def _measure(options: Options, threads: Threads, limits: Limits) -> Iterator[Result]:
    how = options.num_bytes, options.seconds, limits
    for type in options.linear.types:
        yield from measure_type(options.linear, type, options.isa, threads, *how)
    machine = _core.Machine(options.isa, options.num_threads)
    if options.threads:
        yield _measure_meeting(machine, options.seconds)
    for heads in options.attention.heads:
        yield from measure_heads(options.attention, heads, machine, *how)
    for vocab_size in options.sampling.vocab_sizes:
        yield from measure_vocabulary(options.sampling, vocab_size, machine, *how)


def _measure_meeting(machine: _core.Machine, seconds: float) -> Result:
    """No memory and no arithmetic: there is no limit to judge it by."""
    times = measure(lambda: machine.meet(MEETINGS), seconds)
    return Result(
        op="threads",
        subject="hand out work, wait for all",
        num_rows=machine.num_threads,
        seconds=times.median / MEETINGS,
        bytes_per_second=0.0,
        operations_per_second=0.0,
        limit="-",
        share=0.0,
        best_share=0.0,
    )


def print_table(options: Options, limits: Limits, results: Sequence[Result], console: Console) -> None:
    """The limits, and one line per result."""
    isa = options.isa or _core.isas()[-1]
    table = Table(
        title=f"{isa}, {options.num_threads} thread(s); linear: K = {options.linear.columns}",
        caption=f"limits: read {limits.read / 1e9:.1f} GB/s, int8 {limits.int8 / 1e9:.1f} GOP/s, "
        f"float32 {limits.float32 / 1e9:.1f} GFLOP/s"
        + ("" if limits.bf16 is None else f", bf16 {limits.bf16 / 1e9:.1f} GFLOP/s"),
    )
    for name in ("op", "of", "rows", "time (ms)", "GB/s", "GOP/s", "limit", "share", "best"):
        table.add_column(name, justify="left" if name in {"op", "of", "limit"} else "right")
    for r in results:
        table.add_row(
            r.op,
            r.subject,
            str(r.num_rows),
            f"{1e3 * r.seconds:.3f}" if r.seconds >= 1e-5 else f"{1e3 * r.seconds:.5f}",
            f"{r.bytes_per_second / 1e9:.1f}" if r.bytes_per_second else "-",
            f"{r.operations_per_second / 1e9:.1f}" if r.operations_per_second else "-",
            r.limit,
            f"{100 * r.share:.0f} %" if r.share else "-",
            f"{100 * r.best_share:.0f} %" if r.best_share else "-",
        )
    console.width = max(console.width, TABLE_WIDTH)
    console.print(table)
