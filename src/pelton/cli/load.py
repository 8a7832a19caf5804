"""`pelton bench serve`: reads its options, runs the comparison, prints what came of it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click
import msgspec
from rich.console import Console

from pelton.bench.serving import compare, plot, table
from pelton.bench.serving.http import Address
from pelton.bench.serving.load import Lengths, Load, Systems
from pelton.bench.serving.result import Objective
from pelton.bench.serving.target import Target, find
from pelton.bench.serving.wire import Endpoint


@dataclass(frozen=True, kw_only=True)
class Options:
    """As they come from the command line; `rate` empty: closed loops of `concurrency`."""

    url: tuple[str, ...]
    endpoint: Endpoint
    concurrency: tuple[int, ...]
    rate: tuple[float, ...]
    prompt: str
    output: str
    system: str | None
    requests: int
    warm_up: int
    repeat: int
    seed: int
    slo: str | None
    timeout: float
    api_key: str | None
    weights: str | None
    as_json: bool
    json_file: Path | None
    plot: Path | None

    def loads(self) -> list[Load]:
        """One per level; two where system prompts are shared, the second with a prompt of each request's own."""
        systems = None if self.system is None else Systems.parse(self.system)
        base = Load(None, None, self.requests, Lengths.parse(self.prompt), Lengths.parse(self.output), systems)
        base = replace(base, num_warm_up=self.warm_up, seed=self.seed)
        if self.rate:
            levels = [replace(base, rate=rate) for rate in self.rate]
        else:
            levels = [replace(base, concurrency=c, num_requests=max(c, self.requests)) for c in self.concurrency]
        if systems is None:
            return levels
        return [replace(load, systems=replace(systems, is_shared=s)) for load in levels for s in (True, False)]


def serve(options: Options) -> None:
    """Drive every server with every load, in turn, and print what came of it."""
    loads = options.loads()
    objective = None if options.slo is None else Objective.parse(options.slo)
    if options.plot is not None:
        plot.check_png(options.plot)
    targets = asyncio.run(_targets(options))
    limit = _read_limit() if any(target.address.is_here for target in targets) else None
    rows = asyncio.run(
        compare.run(
            targets,
            loads,
            options.repeat,
            limit,
            objective=objective,
            timeout=options.timeout,
            tell=lambda line: click.echo(line, err=True),
        )
    )
    _report(options, rows)


def _report(options: Options, rows: Sequence[compare.Row]) -> None:
    ratios = compare.ratios(rows)
    if options.json_file is not None:
        whole = {"results": [compare.flat(row) for row in rows], "ratios": [asdict(ratio) for ratio in ratios]}
        options.json_file.write_bytes(msgspec.json.format(msgspec.json.encode(whole)) + b"\n")
    if options.plot is not None:
        plot.png(rows, options.plot)
    for line in compare.warnings(rows):
        click.echo(line, err=True)
    if options.as_json:
        for row in rows:
            click.echo(msgspec.json.encode(compare.flat(row)))
        return
    tables = [table.rates(rows), table.times(rows), *([table.comparison(ratios)] if ratios else [])]
    for each in tables:
        # A narrow terminal breaks lines; the table itself is never cut.
        Console(width=max(Console().width, Console(width=1000).measure(each).maximum)).print(each)
    is_utf = (sys.stdout.encoding or "").lower().startswith("utf")
    click.echo(plot.bars(rows, "█" if is_utf else "#"))


async def _targets(options: Options) -> list[Target]:
    """Named as in NAME=URL, or by their address."""
    targets: list[Target] = []
    for entry in options.url:
        name, _, url = entry.rpartition("=") if not entry.startswith("http") else ("", "", entry)
        address = Address(url.rstrip("/"), options.api_key)
        name = name or address.url.partition("://")[2]
        if name in [target.name for target in targets]:
            raise click.BadParameter(f"two servers are named {name}: --url NAME={url}")
        has_system = options.system is not None
        targets.append(await find(name, address, options.endpoint, options.timeout, has_system=has_system))
    if options.weights is None:
        return targets
    size = _weight_bytes(options.weights)
    return [replace(t, weight_bytes=size) if t.weight_bytes is None else t for t in targets]


def _weight_bytes(weights: str) -> int:
    try:
        return int(weights) if weights.isdecimal() else Path(weights).stat().st_size
    except OSError as error:
        raise click.BadParameter(f"{weights!r} is neither a number of bytes nor a file: {error.strerror}") from None


def _read_limit() -> float:
    # Imported here: a load on a server that is elsewhere needs no compiled core.
    from pelton.bench.limits import READ_BYTES, Threads, measure_read
    from pelton.engine.machine import num_cores

    threads = Threads(num_cores())
    try:
        return measure_read("", threads, READ_BYTES, seconds=0.3)
    finally:
        threads.close()
