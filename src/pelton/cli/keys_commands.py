"""`pelton keys`: its commands and their options."""

from __future__ import annotations

from typing import Any

import click


@click.group()
def keys() -> None:
    """Make, list and revoke the API keys of this machine's servers."""


@keys.command("create")
@click.option("--name", required=True, help="Whose it is.")
@click.option("--scopes", help="Of inference, models, metrics, admin; separated by commas. [default: inference]")
@click.option("--models", help="Names of the models that it may use, separated by commas. [default: all]")
@click.option("--rpm", type=click.IntRange(1), help="Requests per minute. [default: any number]")
@click.option("--tpm", type=click.IntRange(1), help="Tokens per minute, in and out. [default: any number]")
@click.option("--expires", help="30d, 12h, or a date as 2027-01-31 (UTC). [default: never]")
def keys_create(**options: Any) -> None:
    """Make a key and print it, this once."""
    from pelton.cli import keys as command

    command.create(**options)


@keys.command("list")
@click.option("--json", "as_json", is_flag=True, help="One JSON line per key.")
def keys_list(as_json: bool) -> None:
    """List the keys."""
    from pelton.cli import keys as command

    command.list_keys(as_json)


@keys.command("revoke")
@click.argument("name")
def keys_revoke(name: str) -> None:
    """End the key of this NAME, or of this id, at once."""
    from pelton.cli import keys as command

    command.revoke(name)


@keys.command("usage")
@click.option("--name", help="One key's alone: its name or its id. [default: all]")
@click.option("--since", help="First day, as 2027-01-31 (UTC). [default: the first there is]")
@click.option("--json", "as_json", is_flag=True, help="One JSON line per day, key and model.")
def keys_usage(**options: Any) -> None:
    """Show what keys have used, by day and model."""
    from pelton.cli import keys as command

    command.usage(**options)
