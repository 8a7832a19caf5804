"""Options that several commands have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

KV_TYPES = ("f32", "bf16", "f16", "int8")


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The settings of one model's engine; each also has a PELTON_ variable."""
    options = [
        click.option("--threads", type=click.IntRange(1, 1024), help="CPU threads. [default: one per core]"),
        click.option(
            "--context", type=click.IntRange(1), help="Tokens a conversation may hold. [default: the model's]"
        ),
        click.option("--kv-dtype", type=click.Choice(KV_TYPES), help="Type of the KV cache. [default: f16]"),
        click.option(
            "--isa", type=click.Choice(["generic", "avx2", "avx512", "amx"]), help="[default: the CPU's best]"
        ),
        click.option(
            "--speculation",
            type=click.Choice(["auto", "off"]),
            help="Draft tokens from the text so far, where it pays; answers stay the same. [default: auto]",
        ),
        click.option(
            "--draft-model",
            metavar="MODEL",
            help="A smaller model with the same vocabulary that drafts tokens, too, where it pays.",
        ),
        click.option(
            "--packed-cache-size",
            type=click.FloatRange(0),
            help="GB of disk for what makes the next start fast; 0: none. [default: 20]",
        ),
        click.option(
            "--prefix-cache-dir",
            type=click.Path(file_okay=False),
            help="Where prompts' keys and values are kept for the next start. [default: beside the models]",
        ),
        click.option(
            "--prefix-cache-size",
            type=click.FloatRange(0),
            help="GB of disk for them; 0: none. [default: 4]",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def server_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Where the server is that a command asks."""
    url = click.option("--url", help="Address of the server. [default: PELTON_URL, or this machine's port 8000]")
    return url(click.option("--api-key", help="[default: PELTON_API_KEY]")(command))
