"""`pelton keys`: make, list and revoke API keys, and show what they used."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.table import Table

from pelton import config
from pelton.server.keys import Key, KeyStore
from pelton.server.ledger import Used, used
from pelton.server.store import Store

_SPAN = re.compile(r"(\d{1,6})([mhd])")
_UNITS = {"m": "minutes", "h": "hours", "d": "days"}


def create(
    name: str, scopes: str | None, models: str | None, rpm: int | None, tpm: int | None, expires: str | None
) -> None:
    """Make a key: its text goes to standard output, all else to standard error."""
    with _store() as store:
        key, text = KeyStore(store).create(
            name,
            scopes=_words(scopes or "inference"),
            models=_words(models or ""),
            rpm=rpm,
            tpm=tpm,
            expires_at=None if expires is None else _time(expires),
        )
    click.echo(f"the key {key.name!r} ({key.id}); it is shown this once:", err=True)
    click.echo(text)


def list_keys(as_json: bool) -> None:
    """Print what is known of all keys."""
    with _store() as store:
        keys = KeyStore(store).all()
    if as_json:
        for key in keys:
            click.echo(msgspec.json.encode(key))
        return
    table = Table("id", "name", "scopes", "models", "rpm", "tpm", "created", "expires", "state", box=None)
    for key in keys:
        table.add_row(
            key.id,
            key.name,
            ",".join(sorted(key.scopes)),
            "all" if key.models is None else ",".join(key.models),
            str(key.rpm or "-"),
            str(key.tpm or "-"),
            _day(key.created_at),
            "never" if key.expires_at is None else _day(key.expires_at),
            _state(key),
        )
    _print(table)


def revoke(name: str) -> None:
    """End a key."""
    with _store() as store:
        key = KeyStore(store).revoke(name)
    click.echo(f"the key {key.name!r} ({key.id}) is revoked", err=True)


def usage(name: str | None, since: str | None, as_json: bool) -> None:
    """Print what keys have used."""
    first = "" if since is None else _date(since).date().isoformat()
    with _store() as store:
        names = {key.id: key.name for key in KeyStore(store).all()}
        rows = [row for row in used(store, first) if name in (None, row.key_id, names.get(row.key_id))]
    if as_json:
        for row in rows:
            click.echo(msgspec.json.encode({"name": names.get(row.key_id, row.key_id), **msgspec.structs.asdict(row)}))
        return
    table = Table("day", "key", "model", box=None)
    for title in ("requests", "failed", "prompt", "cached", "completion"):
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(row.day, names.get(row.key_id, row.key_id), row.model, *map(str, _counts(row)))
    _print(table)


def _counts(row: Used) -> tuple[int, ...]:
    return row.requests, row.failed, row.prompt_tokens, row.cached_tokens, row.completion_tokens


@contextmanager
def _store() -> Iterator[Store]:
    store = Store(Path(config.load().server.store))
    try:
        yield store
    finally:
        store.close()


def _print(table: Table) -> None:
    # A narrow terminal breaks lines; the table itself is never cut.
    Console(width=max(Console().width, Console(width=1000).measure(table).maximum)).print(table)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _time(text: str) -> float:
    """Seconds since 1970 of "30d", "12h", "45m" from now, or of the beginning of a day (UTC)."""
    if match := _SPAN.fullmatch(text):
        return time.time() + timedelta(**{_UNITS[match[2]]: int(match[1])}).total_seconds()
    return _date(text).timestamp()


def _date(text: str) -> datetime:
    try:
        return datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC)
    except ValueError:
        raise click.BadParameter(f"{text!r} is neither a span (30d, 12h, 45m) nor a day (2027-01-31)") from None


def _day(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")


def _state(key: Key) -> str:
    if key.revoked_at is not None:
        return "revoked"
    return "expired" if key.expires_at is not None and key.expires_at <= time.time() else "valid"
