"""Uvicorn's HTTP protocol with bounds on what comes before a request's body: a connection that never says what it
wants, says it letter by letter, or never stops saying it, is closed. What it has asked for before is answered first:
one answer never stands inside another."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class BoundedProtocol(HttpToolsProtocol):
    """One connection. Uvicorn makes it, so its bounds are its class's: `bounded_protocol`."""

    head_seconds: float
    max_head_bytes: int

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The first head's time begins."""
        super().connection_made(transport)
        self._num_head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._is_in_body = False
        self._refusal: bytes | None = None
        """The last words, once it is known that nothing more will be read."""
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing more is waited for."""
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count the bytes of heads."""
        if self._refusal is not None:
            return
        if self._head_timer is None and self._is_idle:
            self._expect_head()
        # Of a request that was answered before it was all there. These are no bytes of a head.
        is_rest_of_body, timer = self._is_in_body, self._head_timer
        super().data_received(data)
        # Where the head has begun in these bytes, others stand before it.
        if self._head_timer is not None and self._head_timer is timer and not is_rest_of_body:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > self.max_head_bytes:
                self._refuse(b"431 Request Header Fields Too Large")

    def on_message_begin(self) -> None:
        """A head begins, maybe behind a request that is being answered."""
        if self._head_timer is None:  # behind a request that is being answered still
            self._expect_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """A head is there."""
        self._end_head()
        self._is_in_body = True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """A request is there, body and all."""
        self._is_in_body = False
        if self._head_timer is not None:  # the request had its answer before: the next one's time begins
            self._expect_head()
        super().on_message_complete()

    def _expect_head(self) -> None:
        self._end_head()
        self._num_head_bytes = 0
        self._head_timer = self.loop.call_later(self.head_seconds, self._refuse, b"408 Request Timeout")

    def _end_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    @property
    def _is_idle(self) -> bool:
        """Has all that was asked for been answered?"""
        return self.cycle is None or self.cycle.response_complete

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, behind the answers before it."""
        if not self._is_in_body or self._is_idle or self.pipeline:
            self._refuse(b"400 Bad Request", msg.encode())
        elif self.cycle.response_started:
            self.transport.close()
        else:
            super().send_400_response(msg)

    def on_response_complete(self) -> None:
        """An answer is out: the last words may follow."""
        super().on_response_complete()
        if self._refusal is not None and self._is_idle:
            self._say_last(self._refusal)

    def _refuse(self, status: bytes, reason: bytes = b"") -> None:
        """Read no more, and say why once all answers are out."""
        self._end_head()
        self._refusal = b"HTTP/1.1 %b\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\n" % (
            status,
            len(reason),
        )
        self._refusal += b"connection: close\r\n\r\n" + reason
        if self._is_idle:
            self._say_last(self._refusal)

    def _say_last(self, words: bytes) -> None:
        if not self.transport.is_closing():
            if not self._is_in_body:  # else it has its answer
                self.transport.write(words)
            self.transport.close()

    def _should_upgrade_to_ws(self) -> bool:
        return False

    def _unsupported_upgrade_warning(self) -> None:
        """Quiet: the application answers requests for another protocol."""


def bounded_protocol(seconds: float, max_bytes: int) -> type[BoundedProtocol]:
    """The class for a server whose requests' first lines and headers may take so many seconds and bytes."""
    return type("BoundedProtocol", (BoundedProtocol,), {"head_seconds": seconds, "max_head_bytes": max_bytes})
