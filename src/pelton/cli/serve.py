"""`pelton serve`: load a model and answer over HTTP."""

from __future__ import annotations

import asyncio
import importlib
import logging
from typing import Any

import click

from pelton import config


def serve(model: str, *, served_name: str | None, **options: Any) -> None:
    """Serve until a signal ends it."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    asyncio.run(_serve(model, served_name, config.load(**options)))


async def _serve(model: str, served_name: str | None, settings: config.Config) -> None:
    """The model loads while the server's modules do; the port is taken at once and opens when the model is ready."""
    from pelton.pool import Pool
    from pelton.progress.display import Display

    pool = Pool(settings)
    try:
        with Display() as display:
            loading = asyncio.ensure_future(pool.load(model, display, name=served_name))
            app = await asyncio.to_thread(importlib.import_module, "pelton.server.app")
            bound = app.bind(settings.server)
            service = await loading
        host = f"[{settings.server.host}]" if ":" in settings.server.host else settings.server.host

        def announce(port: int) -> None:
            click.echo(f"{service.name} is ready at http://{host}:{port}", err=True)

        await app.serve(pool, settings.server, bound, announce)
    finally:
        await pool.close()
