"""The HTTP application and its life: routes of all dialects, errors, start, drain."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from pelton.config import ServerConfig
from pelton.errors import ConfigError, InternalError, InvalidRequest, PeltonError
from pelton.pool import Pool
from pelton.server import openai, prefix_cache
from pelton.server.guard import Guard
from pelton.server.openai_reply import error_body
from pelton.server.wire import JSON

log = logging.getLogger("pelton.server")

BACKLOG = 2048
"""Connections that may wait to be accepted."""


class NotFound(InvalidRequest):
    """No such route, or not with this method."""

    status = 404


def build(pool: Pool, config: ServerConfig) -> Guard:
    """The whole application."""

    async def health(_: Request) -> Response:
        if guard.is_draining:
            return JSON({"status": "draining"}, status_code=503)
        return JSON({"status": "ok"})

    app = Starlette(
        routes=[Route("/health", health, methods=["GET"]), *openai.routes(pool), *prefix_cache.routes(pool)],
        exception_handlers={PeltonError: _on_error, HTTPException: _on_http, Exception: _on_bug},
    )
    guard = Guard(app, max_body=config.max_body, write_error=_write_error)
    return guard


def _response(error: PeltonError) -> Response:
    headers = {} if error.retry_after is None else {"retry-after": str(max(1, math.ceil(error.retry_after)))}
    return JSON(error_body(error), status_code=error.status, headers=headers)


async def _on_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, PeltonError)
    return _response(error)


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    problem = NotFound(f"{request.method} {request.url.path} is not offered here")
    response = _response(problem)
    response.status_code = error.status_code
    response.headers.update(error.headers or {})
    return response


async def _on_bug(_: Request, error: Exception) -> Response:
    log.error("a request failed inside the server", exc_info=error)
    return _response(InternalError("the server failed; its log says why"))


async def _write_error(error: PeltonError, scope: Scope, receive: Receive, send: Send) -> None:
    await _response(error)(scope, receive, send)


class _Server(uvicorn.Server):
    """Uvicorn that drains. The first signal refuses new work and lets answers under way end; those that have not
    ended by the drain timeout get an error as their last event, from the pool that closes under them. The second
    signal ends at once."""

    def __init__(self, guard: Guard, pool: Pool, config: ServerConfig) -> None:
        settings = uvicorn.Config(
            guard,
            host=config.host,
            port=config.port,
            backlog=BACKLOG,
            log_level="warning",
            access_log=False,
            server_header=False,
            lifespan="off",
            timeout_graceful_shutdown=5,
        )
        super().__init__(settings)
        self._guard = guard
        self._pool = pool
        self._drain_timeout = config.drain_timeout
        self._drain: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came; called between two callbacks of the event loop's thread."""
        if self._guard.is_draining or not self.started:
            log.warning("%s: ending at once", signal.Signals(sig).name)
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # it would tell of each answer that is cut
            self.force_exit = self.should_exit = True
            return
        self._guard.drain()
        log.warning("%s: draining for up to %g s", signal.Signals(sig).name, self._drain_timeout)
        asyncio.get_running_loop().call_soon_threadsafe(self._begin_drain)

    def _begin_drain(self) -> None:
        self._drain = asyncio.ensure_future(self._wait_for_answers())

    async def _wait_for_answers(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._drain_timeout
        while self._guard.num_active and loop.time() < deadline:
            await asyncio.sleep(0.02)
        await self._pool.close()
        self.should_exit = True


def bind(config: ServerConfig) -> socket.socket:
    """A socket at the configured address, not open yet. Raises `ConfigError` where the address cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise _cannot_listen(config, error) from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise _cannot_listen(config, error) from None
    return bound


def _cannot_listen(config: ServerConfig, error: Exception) -> ConfigError:
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return ConfigError(f"cannot listen on {config.host}, port {config.port}: {reason}", param="port")


async def serve(
    pool: Pool, config: ServerConfig, bound: socket.socket, on_ready: Callable[[int], None] = lambda port: None
) -> None:
    """Serve until a signal ends it, then close the pool. `bound` is what `bind` gave; `on_ready` gets the port once
    it answers."""
    try:
        bound.listen(BACKLOG)
    except OSError as error:  # taken since it was bound
        raise _cannot_listen(config, error) from None
    server = _Server(build(pool, config), pool, config)
    running = asyncio.ensure_future(server.serve(sockets=[bound]))
    try:
        while not server.started and not running.done():
            await asyncio.sleep(0.005)
        if server.started:
            on_ready(bound.getsockname()[1])
        await running
    finally:
        await pool.close()
