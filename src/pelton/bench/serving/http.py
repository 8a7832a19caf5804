"""One HTTP/1.1 request on a connection of its own, with little work for each piece of the answer.

On a machine whose cores are all the server's, what the client takes is taken from what it measures; httpx2 takes about
three times as much CPU time per piece. Each request opens its connection, as those of different users do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

import httptools

from pelton.errors import InvalidRequest

Receive = Callable[[int, bytes], None]
"""Takes the status and a piece of the body."""


@dataclass(frozen=True)
class Address:
    """Where a server is, and how it wants to be asked."""

    url: str
    """Without a slash at its end."""
    api_key: str | None = None

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_good = False
        if not is_good:
            raise InvalidRequest(f"{self.url!r} is not the address of a server (http://HOST:PORT)")

    @property
    def is_here(self) -> bool:
        """Is the server on this machine, as far as its address tells?"""
        host = urlsplit(self.url).hostname or ""
        try:
            return host == "localhost" or ip_address(host).is_loopback
        except ValueError:
            return False

    def head(self, method: str, path: str, num_bytes: int) -> bytes:
        """The request up to its body."""
        parts = urlsplit(self.url)
        lines = [f"{method} {parts.path}{path} HTTP/1.1", f"Host: {parts.netloc.rpartition('@')[2]}"]
        lines += ["Content-Type: application/json", f"Content-Length: {num_bytes}", "Connection: close"]
        if self.api_key is not None:
            lines.append(f"Authorization: Bearer {self.api_key}")
        return "\r\n".join([*lines, "", ""]).encode()


class _Exchange(asyncio.Protocol):
    """Sends the request as soon as there is a connection; `status` is known when the whole answer is."""

    def __init__(self, request: bytes, receive: Receive) -> None:
        self._request, self._receive = request, receive
        self._parser = httptools.HttpResponseParser(self)
        self.status: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionError(f"the answer is not HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(exc or ConnectionError("the connection was closed before the answer's end"))

    def on_body(self, body: bytes) -> None:
        self._receive(self._parser.get_status_code(), body)

    def on_message_complete(self) -> None:
        if not self.status.done():
            self.status.set_result(self._parser.get_status_code())

    def _fail(self, error: Exception) -> None:
        if not self.status.done():
            self.status.set_exception(error)


async def send(address: Address, method: str, path: str, body: bytes, receive: Receive) -> int:
    """The status, when `receive` (which must not raise) has had the whole answer. Raises OSError."""
    parts = urlsplit(address.url)
    exchange = _Exchange(address.head(method, path, len(body)) + body, receive)
    secure = parts.scheme == "https"
    transport, _ = await asyncio.get_running_loop().create_connection(
        lambda: exchange, parts.hostname or "", parts.port or (443 if secure else 80), ssl=secure or None
    )
    try:
        return await exchange.status
    finally:
        transport.close()
