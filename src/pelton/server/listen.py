"""The server's life: take the address, start, drain, end."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import signal
import socket
import ssl
from collections.abc import Callable
from contextvars import Context
from types import FrameType
from typing import NamedTuple, cast
from urllib.parse import urlsplit

import uvicorn

from pelton.config import ServerConfig
from pelton.errors import ConfigError, InternalError
from pelton.pool import Pool
from pelton.server.acceptor import Acceptor, max_connections, raise_file_limit
from pelton.server.app import App
from pelton.server.protocol import bounded_protocol

log = logging.getLogger("pelton.server")

LAST_SECONDS = 2.0
"""For answers that were cut off to end in."""
BACKLOG = 2048
"""Connections that may wait to be accepted."""


class _Uvicorn(uvicorn.Server):
    """Uvicorn that drains. The first signal refuses new work and lets answers under way end; those that have not
    ended by the drain timeout get an error as their last event, from the pool that closes under them. The second
    signal ends at once."""

    def __init__(self, app: App, pool: Pool, config: ServerConfig) -> None:
        settings = uvicorn.Config(
            app.guard,
            http=bounded_protocol(config.header_timeout, config.max_headers),
            ssl_certfile=config.ssl_certfile or None,
            ssl_keyfile=config.ssl_keyfile or None,
            host=config.host,
            port=config.port,
            backlog=BACKLOG,
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            lifespan="on",
            timeout_graceful_shutdown=5,
        )
        try:
            settings.load()
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"the certificate {config.ssl_certfile} cannot be used: {error}") from None
        super().__init__(settings)
        self._app = app
        self._pool = pool
        self._drain_timeout = config.drain_timeout
        self._drain: asyncio.Task[None] | None = None
        self._most = max_connections(config.max_connections, raise_file_limit())

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin what runs beside the answers, and take connections."""
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            raise InternalError("the server's application could not be started; its log says why")

        def make() -> asyncio.Protocol:
            kind = self.config.http_protocol_class
            return kind(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)  # type: ignore[call-arg]

        open_now, tls = self.server_state.connections, self.config.ssl
        acceptors = [Acceptor(each, make, open_now, most=self._most, tls=tls) for each in sockets or ()]
        self.servers = cast("list[asyncio.base_events.Server]", acceptors)
        self.started = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came; called anywhere in the event loop's thread, so maybe in the context of a request."""
        Context().run(self._on_signal, sig)

    def _on_signal(self, sig: int) -> None:
        if self._app.guard.is_draining or not self.started:
            log.warning("%s: ending at once", signal.Signals(sig).name)
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # it would tell of each answer that is cut
            self.force_exit = self.should_exit = True
            return
        self._app.guard.drain()
        log.warning("%s: draining for up to %g s", signal.Signals(sig).name, self._drain_timeout)
        asyncio.get_running_loop().call_soon_threadsafe(self._begin_drain)

    def _begin_drain(self) -> None:
        self._drain = asyncio.ensure_future(self._wait_for_answers())

    async def _wait_for_answers(self) -> None:
        self._pool.give_up_loads()  # which may take minutes, and what has not begun is refused
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._drain_timeout
        while self._app.num_active and loop.time() < deadline:
            await asyncio.sleep(0.02)
        await self._pool.close()
        self.should_exit = True


class Address(NamedTuple):
    """Where to listen. `param`: the setting that says it."""

    host: str
    port: int
    param: str


OLLAMA_PORT = 11434


def addresses(config: ServerConfig) -> list[Address]:
    """All that are configured. Raises `ConfigError` for one that is none."""
    own = Address(config.host, config.port, "port")
    return [own, _ollama_address(config.ollama)] if config.ollama else [own]


def _ollama_address(text: str) -> Address:
    try:
        parts = urlsplit(text if "://" in text else f"//{text}")
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"ollama={text!r} is no address, as 127.0.0.1:11434: {error}", param="ollama") from None
    if parts.scheme not in ("", "http", "https") or parts.path.strip("/") or parts.query or "@" in parts.netloc:
        raise ConfigError(f"ollama={text!r} is no address, as 127.0.0.1:11434", param="ollama")
    return Address(parts.hostname or "127.0.0.1", OLLAMA_PORT if port is None else port, "ollama")


def bind(config: Address) -> socket.socket:
    """A socket at the address, not open yet. Raises `ConfigError` where it cannot be had."""
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


def _cannot_listen(config: Address, error: Exception) -> ConfigError:
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return ConfigError(f"cannot listen on {config.host}, port {config.port}: {reason}", param=config.param)


class Server:
    """Addresses, taken but not open yet, and what will answer there."""

    def __init__(self, pool: Pool, config: ServerConfig) -> None:
        """Raises `ConfigError` where the address, the keys, the store or the certificate cannot be used, or where
        others than this machine's users could come in without a key."""
        self._pool = pool
        self._config = config
        self._bound: list[socket.socket] = []
        try:
            self._addresses = addresses(config)
            for address in self._addresses:
                self._bound.append(bind(address))
            self._app = App(pool, config)
            self._check_exposure()
            self._uvicorn = _Uvicorn(self._app, pool, config)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the addresses back, where it does not run."""
        for bound in self._bound:
            bound.close()

    def _check_exposure(self) -> None:
        open_to = [
            address
            for address, bound in zip(self._addresses, self._bound, strict=True)
            if not ipaddress.ip_address(bound.getsockname()[0]).is_loopback
        ]
        if self._config.insecure or not self._app.keys.is_empty or not open_to:
            return
        raise ConfigError(
            f"whoever reaches {open_to[0].host} could use this server, for there is no API key. Make one with "
            "`pelton keys create --name NAME`, or give one in PELTON_API_KEY or with --api-key-file; with --insecure "
            "anyone is served",
            param="host",
        )

    async def run(self, on_ready: Callable[[int], None] = lambda port: None) -> None:
        """Serve until a signal ends it, then close the pool. `on_ready` gets the port once it answers."""
        for address, bound in zip(self._addresses, self._bound, strict=True):
            try:
                bound.listen(BACKLOG)
            except OSError as error:  # taken since it was bound
                raise _cannot_listen(address, error) from None
        running = asyncio.ensure_future(self._uvicorn.serve(sockets=self._bound))
        try:
            while not self._uvicorn.started and not running.done():
                await asyncio.sleep(0.005)
            if self._uvicorn.started:
                on_ready(self._bound[0].getsockname()[1])
            await running
        finally:
            await self._pool.close()
            if tasks := list(self._uvicorn.server_state.tasks):  # what was cut short has something to write down
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks, timeout=LAST_SECONDS)
            self._app.close()
