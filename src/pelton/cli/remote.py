"""`pelton ps | stop`: ask a server that runs."""

from __future__ import annotations

import json
import ssl
import time
import urllib.error
import urllib.request
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table

from pelton import config
from pelton.cli.models import size_text
from pelton.errors import PeltonError, Unavailable
from pelton.pool import Memory, Resident


class _Loaded(msgspec.Struct, frozen=True, kw_only=True):
    data: list[Resident]
    memory: Memory


def ps(as_json: bool, **options: Any) -> None:
    """One line per model that takes memory, or is about to."""
    body = _ask("GET", "/pelton/models", None, **options)
    if as_json:
        click.echo(body)
        return
    loaded = msgspec.json.decode(body, type=_Loaded)
    table = Table(box=None, pad_edge=False)
    for name in ("name", "state", "memory", "weights", "kv", "context", "requests", "until"):
        table.add_column(name, justify="left" if name in {"name", "state", "until"} else "right")
    for each in loaded.data:
        state = f"{each.state} {each.share:.0%}" if each.state == "loading" else each.state
        table.add_row(
            each.name,
            state,
            size_text(each.memory),
            size_text(each.weight_bytes),
            size_text(each.kv_bytes),
            str(each.context or ""),
            str(each.num_requests),
            _until(each),
        )
    if loaded.data:
        Console().print(table)
    memory = loaded.memory
    what = "models are" if loaded.data else "no model is"
    click.echo(f"{what} loaded; {size_text(memory.used)} of {size_text(memory.budget)} are taken", err=not loaded.data)


def _until(model: Resident) -> str:
    if model.expires_at is None:
        return "in use" if model.num_requests else "it is stopped"
    return f"{max(0, round(model.expires_at - time.time()))} s from now"


def stop(models: tuple[str, ...], **options: Any) -> None:
    """Unload models."""
    for name in models:
        _ask("POST", "/pelton/models/unload", {"model": name}, **options)
        click.echo(f"{name} is unloaded")


def _ask(method: str, path: str, body: Any, *, url: str | None, api_key: str | None) -> str:
    """The answer's text. Raises what the server says is wrong, or that there is none."""
    settings = config.load(url=url, api_key=api_key)
    address = (settings.client.url or _own_address(settings.server)).rstrip("/")
    if not address.startswith(("http://", "https://")):
        address = f"http://{address}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address + path, data, {"content-type": "application/json"}, method=method)
    if settings.server.api_key:
        # Not for where the answer may redirect to.
        request.add_unredirected_header("authorization", f"Bearer {settings.server.api_key}")
    try:
        with urllib.request.urlopen(request) as answer:
            text: str = answer.read().decode()
            return text
    except urllib.error.HTTPError as error:
        raise PeltonError(_message(error)) from None
    except (OSError, ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise Unavailable(f"no server answers at {address}: {reason}; --url says where it is") from None


def _own_address(server: config.ServerConfig) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(server.host, server.host)
    return f"{'https' if server.ssl_certfile else 'http'}://{f'[{host}]' if ':' in host else host}:{server.port}"


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read())["error"]["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"{error.url} answers {error.code} {error.reason}"
