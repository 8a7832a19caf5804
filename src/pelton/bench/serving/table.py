"""The tables of `pelton bench serve`."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from pelton.bench.serving.compare import METRICS, TIMES, Get, Ratio, Row, grouped, median, time_of


def rates(rows: Sequence[Row]) -> Table:
    """A line for each load on each server: what it did per second, medians over the rounds."""
    load, limit = rows[0].load, next((row.read_limit for row in rows if row.read_limit), None)
    systems = "" if load.systems is None else f"{load.systems.num_tokens} + "
    has_goodput = rows[0].result.goodput is not None
    table = _table(
        f"{systems}{load.prompt} tokens in, {load.output} out",
        [
            *_HEAD,
            "tokens/s",
            *(["good/s (share)"] if has_goodput else []),
            "failed",
            "weights GB/s (share)",
            "client CPU",
        ],
    )
    table.caption = f"limit: this machine reads {limit / 1e9:.1f} GB/s" if limit else None
    for group in grouped(rows):
        cells = [*_head(group), _number(group, lambda row: row.result.tokens_per_second, "{:.1f}")]
        if has_goodput:
            share = _number(group, lambda row: row.result.good_share, "{:.0%}")
            cells.append(f"{_number(group, lambda row: row.result.goodput, '{:.2f}')} ({share})")
        cells.append(str(sum(row.result.num_failed for row in group)))
        read = _number(group, lambda row: row.weights_read and row.weights_read / 1e9, "{:.2f}")
        share = _number(group, lambda row: row.share, "{:.0%}")
        cells.append(read if share == "-" else f"{read} ({share})")
        table.add_row(*cells, _number(group, lambda row: row.result.client_share, "{:.1%}"))
    return table


def times(rows: Sequence[Row]) -> Table:
    """A line for each load on each server: what its users felt, medians over the rounds."""
    table = _table("ms: median/p95/p99", [*_HEAD, *(metric.upper() for metric in TIMES)])
    for group in grouped(rows):
        table.add_row(*_head(group), *(_times(group, metric) for metric in TIMES))
    return table


def comparison(found: Sequence[Ratio]) -> Table:
    """How many times as fast one is as the other."""
    names = ["load", "server", "beside", "tokens/s", *(metric.upper() for metric in TIMES)]
    table = _table("how many times as fast: medians of the rounds' ratios", names)
    for ratio in found:
        factors = [ratio.factors[metric] for metric in METRICS]
        table.add_row(ratio.level, ratio.ours, ratio.theirs, *("-" if f is None else f"{f:.2f}x" for f in factors))
    return table


_HEAD = ("load", "server")


def _table(title: str, names: Sequence[str]) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    for name in names:
        is_text = name in ("server", "beside")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=True, overflow="fold")
    return table


def _head(group: Sequence[Row]) -> list[str]:
    return [group[0].load.level, group[0].label]


def _number(group: Sequence[Row], get: Get, form: str) -> str:
    value = median(group, get)
    return "-" if value is None else form.format(value)


def _times(group: Sequence[Row], metric: str) -> str:
    return "/".join(_number(group, time_of(metric, name), "{:.0f}") for name in ("median", "p95", "p99"))
