"""`pelton bench quality`: how near a model as it runs here is to the same model in float32."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table

from pelton import config
from pelton.bench import quality as bench
from pelton.bench.divergence import Estimate, Quality
from pelton.bench.kernels import TABLE_WIDTH
from pelton.engine.machine import num_cores
from pelton.formats import checkpoint
from pelton.hub.pull import pull
from pelton.models.base import load
from pelton.progress.display import Display
from pelton.text.tokenizer import Tokenizer

COLUMNS = ("perplexity", "mean KLD", "median KLD", "p99 KLD", "same top token")


def quality(
    name: str, text_file: Path | None, num_tokens: int, threads: int | None, as_json: bool, **choices: Any
) -> None:
    """Compare, with a line per window on standard error, and print the table."""
    engine = config.load(threads=threads).engine
    isas = choices.pop("isas") or ((engine.isa,) if engine.isa else ())
    options = bench.Options(isas=isas, num_threads=engine.threads or num_cores(), **choices)
    with Display() as display:
        path = pull(name, config.load().hub, display)
    opened = checkpoint.open(path)
    text, source = read_text(text_file)
    tokenizer = Tokenizer(opened.metadata)
    begin = tokenizer.bos_id if tokenizer.add_bos else None
    windows = bench.cut(tokenizer.encode(text, add_special=False), options.context, num_tokens, begin)
    model = load(opened, options.context)
    click.echo("loading", err=True)
    everyone = bench.load_baseline(model, options), bench.load_candidates(model, options)
    results = bench.compare(*everyone, windows, lambda results: _show_progress(results, options.context, len(windows)))
    subject = {"model": path.name, "text": source, "context": options.context}
    if as_json:
        for result in results:
            click.echo(msgspec.json.encode({**subject, **asdict(result)}))
    else:
        print_table(results, f"{path.name}; {source}; windows of {options.context} tokens", Console())


def read_text(file: Path | None) -> tuple[str, str]:
    """A file's text, or the one that ships with Python, and its name."""
    if file is None:
        return bench.shipped_text()
    try:
        return file.read_text(encoding="utf-8"), file.name
    except UnicodeDecodeError as error:
        raise click.BadParameter(f"{file} is not UTF-8: {error}", param_hint="--text") from None


def _show_progress(results: Sequence[Quality], context: int, num_windows: int) -> None:
    done = results[0].num_tokens // (context - 1)
    known = ", ".join(f"{result.name}: {result.mean_divergence.value:.2g}" for result in results[1:])
    click.echo(f"window {done} of {num_windows}; mean KL divergence so far: {known}", err=True)


def print_table(results: Sequence[Quality], title: str, console: Console) -> None:
    """The baseline's line, which has a perplexity alone, and one per candidate."""
    table = Table(title=title, caption=f"KL divergence from the baseline in nats, over {results[0].num_tokens} tokens")
    table.add_column("")
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for i, result in enumerate(results):
        table.add_row(*cells(result, is_baseline=i == 0))
    console.width = max(console.width, TABLE_WIDTH)
    console.print(table)


def cells(result: Quality, *, is_baseline: bool) -> list[str]:
    """A line of the table."""
    perplexity = f"{result.perplexity.value:.3f} ± {result.perplexity.error:.3f}"
    if is_baseline:
        return [result.name, perplexity, *["-"] * 4]
    divergences = (result.mean_divergence, result.median_divergence, result.p99_divergence)
    agreement = f"{100 * result.agreement.value:.2f} ± {100 * result.agreement.error:.2f} %"
    return [result.name, perplexity, *map(_small, divergences), agreement]


def _small(estimate: Estimate) -> str:
    """As many digits as the error leaves."""
    digits = 8 if not 0 < estimate.error < 1 else 1 - math.floor(math.log10(estimate.error))
    return f"{estimate.value:.{digits}f} ± {estimate.error:.{digits}f}"
