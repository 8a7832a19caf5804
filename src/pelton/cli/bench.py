"""`pelton bench`: each op beside the machine's limits, and the table of a load on one or several servers."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, replace

import click
import msgspec
from rich.console import Console
from rich.table import Table

from pelton.bench import serving


def kernels(
    isa: str, threads: int | None, ops: tuple[str, ...], types: tuple[str, ...], rows: tuple[int, ...], seconds: float
) -> None:
    """Measure the ops that are named, or all, and print the table."""
    # Imported here: a load on a server that is elsewhere needs no compiled core.
    from pelton.bench import kernels as bench
    from pelton.bench.attention import Attention
    from pelton.bench.limits import num_cores
    from pelton.bench.linear import Products
    from pelton.bench.sampling import Sampling

    linear, attention, sampling = Products(num_rows=rows), Attention(), Sampling()
    if types:
        linear = replace(linear, types=bench.types_named(types, isa))
    if ops:
        linear = linear if "linear" in ops else replace(linear, types=())
        attention = attention if "attention" in ops else replace(attention, heads=())
        sampling = sampling if "sampling" in ops else replace(sampling, vocab_sizes=())
    options = bench.Options(isa, threads or num_cores(), linear, attention, sampling, seconds=seconds)
    limits, results = bench.run(options)
    bench.print_table(options, limits, results, Console())


def serve(
    urls: tuple[str, ...], concurrency: tuple[int, ...], prompt: int, output: int, requests: int, as_json: bool
) -> None:
    """Drive every server with every concurrency, in turn, and print what came of it."""
    results = asyncio.run(_drive(urls, concurrency, prompt, output, requests))
    if as_json:
        for url, model, result in results:
            click.echo(msgspec.json.encode({"url": url, "model": model, **asdict(result)}))
        return
    Console().print(_table(results, prompt, output))
    for url, _, result in results:
        if result.num_failed:
            click.echo(f"{url}: {result.num_failed} requests failed, the first with: {result.first_error}", err=True)


async def _drive(
    urls: tuple[str, ...], concurrency: tuple[int, ...], prompt: int, output: int, requests: int
) -> list[tuple[str, str, serving.Result]]:
    models = [await serving.first_model(url) for url in urls]
    results = []
    for level in concurrency:
        for url, model in zip(urls, models, strict=True):
            load = serving.Load(level, max(requests, level), prompt, output, seed=level)
            click.echo(f"{url}: {load.num_requests} requests, {level} at once", err=True)
            results.append((url, model, await serving.drive(url, model, load)))
    return results


def _table(results: list[tuple[str, str, serving.Result]], prompt: int, output: int) -> Table:
    table = Table(title=f"{prompt} tokens in, {output} out; times in ms: median / p95 / p99")
    for name in ("server", "at once", "tokens/s", "first token", "between tokens", "whole answer", "failed"):
        table.add_column(name, justify="left" if name == "server" else "right")
    for url, _, result in results:
        times = (
            "{:.0f} / {:.0f} / {:.0f}".format(*(1000 * t for t in q))
            for q in (result.ttft, result.itl, result.end_to_end)
        )
        level = str(result.load.concurrency)
        table.add_row(url, level, f"{result.tokens_per_second:.1f}", *times, str(result.num_failed))
    return table
