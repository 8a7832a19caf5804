"""`pelton serve`: load models and answer over HTTP."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Coroutine
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from pelton import config, logs

if TYPE_CHECKING:
    from pelton.engine.child import Child
    from pelton.pool import Pool
    from pelton.server.listen import Server
    from pelton.service import Service


log = logging.getLogger("pelton.server")


def serve(
    models: tuple[str, ...], child: Child | None, *, served_name: str | None, any_model: bool, **options: Any
) -> None:
    """Serve until a signal ends it. `any_model`: those of the store, too; without `models` that is so anyway. `child`:
    a process for the first model's engine."""
    if served_name is not None and len(models) != 1:
        raise click.UsageError("--served-name is the name of one MODEL")
    if options["draft_model"] and len(models) != 1:
        raise click.UsageError("--draft-model drafts for one MODEL")
    if options["api_key"] == "":
        raise click.UsageError("--api-key is empty: leave it out to serve without keys")
    for name in ("cors_origin", "allowed_host"):
        options[name] = options[name] or None
    settings = config.load(**options)
    logs.setup(settings.server.log_format, logging.INFO)
    names = {served_name or model: model for model in models}
    asyncio.run(_until_a_signal(_serve(names, any_model or not models, settings, child)))


async def _until_a_signal(serving: Coroutine[Any, Any, None]) -> None:
    """Serve. While models are loaded a first signal gives that up and a second one ends the process at once: engines
    end with it. The server has handlers of its own, from when it answers until all answers are out."""
    loop, work = asyncio.get_running_loop(), asyncio.ensure_future(serving)
    is_ending = False

    def on_signal(signum: int, frame: FrameType | None) -> None:
        nonlocal is_ending
        name = signal.Signals(signum).name
        if is_ending:
            log.warning("%s: ending at once", name)
            os._exit(128 + signum)
        is_ending = True
        log.warning("%s: ending; a second signal ends at once", name)
        loop.call_soon_threadsafe(work.cancel)

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, on_signal)
    await asyncio.wait([work])
    if not (is_ending and work.cancelled()):
        work.result()


async def _serve(named: dict[str, str], is_open: bool, settings: config.Config, child: Child | None) -> None:
    """The models load while the server's modules do; the port is taken at once and opens when they are ready."""
    from pelton.pool import Pool, read_models_file
    from pelton.progress.display import Display

    specs = read_models_file(Path(settings.pool.models_file), settings) if settings.pool.models_file else []
    models = named | {spec.name: spec.model for spec in specs if spec.is_preloaded and spec.name not in named}
    pool = Pool(settings, specs, is_open=is_open, child=child)
    loads: list[asyncio.Future[Service]] = []
    try:
        with Display() as display:
            loads += [asyncio.ensure_future(pool.load(model, display, name=name)) for name, model in models.items()]
            server = await asyncio.to_thread(_open, pool, settings.server)
            await asyncio.gather(*loads)
        host = f"[{settings.server.host}]" if ":" in settings.server.host else settings.server.host
        scheme = "https" if settings.server.ssl_certfile else "http"
        what = f"{', '.join(models)} {'are' if len(models) > 1 else 'is'}" if models else "Pelton is"

        also = f", and at {settings.server.ollama}" if settings.server.ollama else ""

        def announce(port: int) -> None:
            click.echo(f"{what} ready at {scheme}://{host}:{port}{also}", err=True)

        await server.run(announce)
    finally:
        await pool.close()
        await asyncio.gather(*loads, return_exceptions=True)  # given up, where the address could not be had


def _open(pool: Pool, settings: config.ServerConfig) -> Server:
    from pelton.server.listen import Server

    return Server(pool, settings)
