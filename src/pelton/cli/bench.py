"""`pelton bench`: each op beside the machine's limits, and the table of a load on one or several servers."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from rich.console import Console
from rich.table import Table

from pelton import config
from pelton.bench import serving

if TYPE_CHECKING:
    from pelton.bench.kernels import Options
    from pelton.bench.limits import Limits


def kernels(
    isa: str | None,
    threads: int | None,
    ops: tuple[str, ...],
    types: tuple[str, ...],
    rows: tuple[int, ...],
    seconds: float,
    model: str | None,
) -> None:
    """Measure the ops that are named, or all, then the steps of a model, and print the tables."""
    # Imported here: a load on a server that is elsewhere needs no compiled core.
    from pelton.bench import kernels as bench
    from pelton.bench.attention import Attention
    from pelton.bench.linear import Products
    from pelton.bench.sampling import Sampling
    from pelton.engine.machine import num_cores

    isa = config.load(isa=isa).engine.isa
    linear, attention, sampling = Products(num_rows=rows), Attention(), Sampling()
    if types:
        linear = replace(linear, types=bench.types_named(types, isa))
    if ops:
        linear = linear if "linear" in ops else replace(linear, types=())
        attention = attention if "attention" in ops else replace(attention, heads=())
        sampling = sampling if "sampling" in ops else replace(sampling, vocab_sizes=())
    has_threads = not ops or "threads" in ops
    options = bench.Options(isa, threads or num_cores(), linear, attention, sampling, has_threads, seconds=seconds)
    limits, results = bench.run(options)
    bench.print_table(options, limits, results, Console())
    if model is not None:
        _steps(model, options, limits)


def _steps(model: str, options: Options, limits: Limits) -> None:
    from pelton.bench.steps import Steps, measure_steps, print_steps
    from pelton.hub.pull import pull
    from pelton.progress.display import Display

    with Display() as display:
        path = pull(model, config.load().hub, display)
    console = Console()
    for what, profile, results in measure_steps(Steps(), path, options.isa, options.num_threads, limits):
        print_steps(f"{path.name}, {what}", profile, results, console)


@dataclass(frozen=True)
class Row:
    """One load on one server. `read_limit`: bytes per second that this machine reads; None: the server is elsewhere."""

    target: serving.Target
    result: serving.Result
    read_limit: float | None

    @property
    def weights_read(self) -> float | None:
        """Bytes of weights per second."""
        return self.target.weight_bytes and self.result.weights_read(self.target.weight_bytes)

    @property
    def share(self) -> float | None:
        """Of the limit."""
        return self.weights_read and self.read_limit and self.weights_read / self.read_limit


def serve(
    urls: tuple[str, ...],
    concurrency: tuple[int, ...],
    prompt: int,
    output: int,
    requests: int,
    weights: str | None,
    as_json: bool,
) -> None:
    """Drive every server with every concurrency, in turn, and print what came of it."""
    targets = asyncio.run(_targets(urls))
    if weights is not None:
        size = _weight_bytes(weights)
        targets = [replace(t, weight_bytes=size) if t.weight_bytes is None else t for t in targets]
    limit = _read_limit() if any(target.is_here for target in targets) else None
    loads = [serving.Load(level, max(requests, level), prompt, output, seed=level) for level in concurrency]
    rows = asyncio.run(_drive(targets, loads, limit))
    if as_json:
        for row in rows:
            click.echo(msgspec.json.encode(_flat(row)))
        return
    Console().print(_table(rows, prompt, output, limit))
    for row in rows:
        if failed := row.result.num_failed:
            click.echo(
                f"{row.target.url}: {failed} requests failed, the first with: {row.result.first_error}", err=True
            )


async def _targets(urls: tuple[str, ...]) -> list[serving.Target]:
    return [await serving.first_model(url.rstrip("/")) for url in urls]


def _weight_bytes(weights: str) -> int:
    try:
        return int(weights) if weights.isdecimal() else Path(weights).stat().st_size
    except OSError as error:
        raise click.BadParameter(f"{weights!r} is neither a number of bytes nor a file: {error.strerror}") from None


def _read_limit() -> float:
    from pelton.bench.limits import READ_BYTES, Threads, measure_read
    from pelton.engine.machine import num_cores

    threads = Threads(num_cores())
    try:
        return measure_read("", threads, READ_BYTES, seconds=0.3)
    finally:
        threads.close()


async def _drive(targets: list[serving.Target], loads: list[serving.Load], limit: float | None) -> list[Row]:
    rows = []
    for load in loads:
        for target in targets:
            click.echo(f"{target.url}: {load.num_requests} requests, {load.concurrency} at once", err=True)
            result = await serving.drive(target, load)
            rows.append(Row(target, result, limit if target.is_here else None))
    return rows


def _flat(row: Row) -> dict[str, Any]:
    limits = {"weights_read": row.weights_read, "read_limit": row.read_limit, "share": row.share}
    return {**asdict(row.target), **asdict(row.result), **limits}


def _table(rows: list[Row], prompt: int, output: int, limit: float | None) -> Table:
    table = Table(
        title=f"{prompt} tokens in, {output} out; times in ms: median / p95 / p99",
        caption=f"limit: this machine reads {limit / 1e9:.1f} GB/s" if limit else None,
    )
    names = ("server", "at once", "tokens/s", "weights read (GB/s)", "share")
    for name in (*names, "first token", "between tokens", "whole answer", "failed"):
        table.add_column(name, justify="left" if name == "server" else "right")
    for row in rows:
        result = row.result
        times = (
            "{:.0f} / {:.0f} / {:.0f}".format(*(1000 * t for t in q))
            for q in (result.ttft, result.itl, result.end_to_end)
        )
        table.add_row(
            row.target.url,
            str(result.load.concurrency),
            f"{result.tokens_per_second:.1f}",
            "-" if row.weights_read is None else f"{row.weights_read / 1e9:.2f}",
            "-" if row.share is None else f"{100 * row.share:.0f} %",
            *times,
            str(result.num_failed),
        )
    return table
