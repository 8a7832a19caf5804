"""`pelton plan`: what memory a model takes here, and what fits into it."""

from __future__ import annotations

from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table

from pelton import config
from pelton.cli.models import size_text
from pelton.engine import machine
from pelton.engine.outlook import Outlook, look
from pelton.engine.protocol import Start
from pelton.hub.store import Store
from pelton.pool import OVERHEAD


def plan(model: str, *, as_json: bool, **options: Any) -> None:
    """Print the plan; the exit status is 1 where the model cannot be loaded."""
    settings = config.load(**options)
    store = Store(settings.hub)
    path = store.resolve(model)
    draft = store.resolve(settings.engine.draft_model) if settings.engine.draft_model else None
    available = int(settings.pool.memory_budget) or machine.free_memory()
    start = Start(str(path), settings.engine, draft_path=None if draft is None else str(draft))
    outlook = look(start, max(0, available - OVERHEAD))
    if as_json:
        click.echo(msgspec.json.encode(_plain(model, outlook, available)))
    else:
        _show(model, outlook, available)
    if outlook.plan is None:
        raise click.exceptions.Exit(1)


def _plain(model: str, outlook: Outlook, available: int) -> dict[str, Any]:
    plan, advice = outlook.plan, outlook.advice
    return {
        "model": model,
        "fits": plan is not None,
        "problem": outlook.problem or None,
        "available_bytes": available,
        "least_bytes": outlook.least + OVERHEAD,
        "usual_bytes": outlook.usual + OVERHEAD,
        "process_bytes": OVERHEAD,
        "weight_bytes": outlook.needs.weights,
        "arena_bytes": outlook.needs.arena,
        "kv_bytes_per_token": outlook.kv_per_token,
        "kv_dtype": outlook.kv_dtype,
        "kv_bytes": None if plan is None else plan.kv,
        "swap_bytes": None if plan is None else plan.swap,
        "context": None if plan is None else plan.context,
        "trained_context": outlook.trained,
        "streams": [{"tokens": tokens, "streams": count} for tokens, count in outlook.streams],
        "recommended": None
        if advice is None
        else {"context": advice.context, "kv_dtype": advice.kv_dtype, "max_sequences": advice.max_sequences},
    }


def _show(model: str, outlook: Outlook, available: int) -> None:
    needs, plan = outlook.needs, outlook.plan
    rows = [
        ("weights", size_text(needs.weights)),
        ("working memory", size_text(needs.arena)),
        ("process and vocabulary", size_text(OVERHEAD)),
        (f"a token's keys and values, {outlook.kv_dtype}", size_text(round(outlook.kv_per_token))),
        ("all, with the shortest context", size_text(outlook.least + OVERHEAD)),
        (f"all, with one stream of {outlook.trained} tokens", size_text(outlook.usual + OVERHEAD)),
        ("memory that it may take", size_text(available)),
    ]
    _print((), rows)
    if plan is None:
        click.echo(f"\n{model} cannot be loaded: {outlook.problem}")
    else:
        cut = "" if plan.context == outlook.trained else f", of {outlook.trained}"
        context = f"a context of {plan.context} tokens{cut}"
        click.echo(f"\n{model} can be loaded: {size_text(plan.kv)} of KV memory, {context}")
        _print(("tokens", "streams at once"), [(str(tokens), str(count)) for tokens, count in outlook.streams])
    if advice := outlook.advice:
        click.echo(
            f"\nrecommended: --context {advice.context} --kv-dtype {advice.kv_dtype} "
            f"--max-sequences {advice.max_sequences}"
        )
    else:
        click.echo("\nno context and no type of keys and values makes it fit: take a smaller model or quantisation")


def _print(header: tuple[str, ...], rows: list[tuple[str, str]]) -> None:
    table = Table(*header, box=None, pad_edge=False, show_header=bool(header))
    if not header:
        table.add_column()
        table.add_column()
    table.columns[1].justify = "right"
    for row in rows:
        table.add_row(*row)
    Console().print(table)
