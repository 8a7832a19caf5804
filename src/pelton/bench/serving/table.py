"""The tables of `pelton bench serve`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from pelton.bench.serving.compare import METRICS, TIMES, Get, Ratio, Row, grouped, median, time_of


def results(rows: Sequence[Row]) -> Table:
    """A line for each load on each server, medians over the rounds."""
    load, limit = rows[0].load, next((row.read_limit for row in rows if row.read_limit), None)
    systems = "" if load.systems is None else f"{load.systems.num_tokens} + "
    table = Table(
        title=f"{systems}{load.prompt} tokens in, {load.output} out; times in ms: median / p95 / p99",
        caption=f"limit: this machine reads {limit / 1e9:.1f} GB/s" if limit else None,
    )
    has_goodput = rows[0].result.goodput is not None
    names = ["load", "server", *(["system"] if load.systems else []), "tokens/s", *(metric.upper() for metric in TIMES)]
    names += [*(["good/s (share)"] if has_goodput else []), "failed", "weights GB/s (share)", "client CPU"]
    for name in names:
        table.add_column(name, justify="left" if name in ("server", "system") else "right")
    for group in grouped(rows):
        name, level, is_shared = group[0].key
        cells = [level, name, *([] if is_shared is None else ["shared" if is_shared else "own"])]
        cells += [_number(group, lambda row: row.result.tokens_per_second, "{:.1f}")]
        cells += [_times(group, metric) for metric in TIMES]
        if has_goodput:
            share = _number(group, lambda row: row.result.good_share, "{:.0%}")
            cells.append(f"{_number(group, lambda row: row.result.goodput, '{:.2f}')} ({share})")
        cells.append(str(sum(row.result.num_failed for row in group)))
        read = _number(group, lambda row: row.weights_read and row.weights_read / 1e9, "{:.2f}")
        share = _number(group, lambda row: row.share, "{:.0%}")
        cells.append(read if share == "-" else f"{read} ({share})")
        cells.append(_number(group, lambda row: row.result.client_share, "{:.0%}"))
        table.add_row(*cells)
    return table


def comparison(found: Sequence[Ratio]) -> Table:
    """How many times as fast one is as the other."""
    table = Table(title="how many times as fast: medians of the rounds' ratios")
    names = ["load", "", "beside", "tokens/s", *(metric.upper() for metric in TIMES)]
    for name in names:
        table.add_column(name, justify="left" if name in ("", "beside") else "right")
    for ratio in found:
        factors = [ratio.factors[metric] for metric in METRICS]
        table.add_row(ratio.level, ratio.ours, ratio.theirs, *("-" if f is None else f"{f:.2f}x" for f in factors))
    return table


def _number(group: Sequence[Row], get: Get, form: str) -> str:
    value = median(group, get)
    return "-" if value is None else form.format(value)


def _times(group: Sequence[Row], metric: str) -> str:
    return " / ".join(_number(group, time_of(metric, name), "{:.0f}") for name in ("median", "p95", "p99"))
