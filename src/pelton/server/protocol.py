"""Uvicorn's HTTP protocol with bounds on what comes before a request's body: a connection that never says what it
wants, says it letter by letter, or never stops saying it, is closed."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


def bounded_protocol(seconds: float, max_bytes: int) -> type[HttpToolsProtocol]:
    """The class for a server whose requests' first lines and headers may take so many seconds and bytes."""

    class Bounded(HttpToolsProtocol):
        head_seconds = seconds
        max_head_bytes = max_bytes

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._num_head_bytes = 0
            self._head_timer: asyncio.TimerHandle | None = None
            self._is_in_body = False
            self._expect_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._end_head()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._head_timer is None and (self.cycle is None or self.cycle.response_complete):
                self._expect_head()
            # Of a request that was answered before it was all there. These are no bytes of a head.
            is_rest_of_body = self._is_in_body
            super().data_received(data)
            if self._head_timer is not None and not is_rest_of_body:
                self._num_head_bytes += len(data)
                if self._num_head_bytes > self.max_head_bytes:
                    self._refuse(b"431 Request Header Fields Too Large")

        def on_message_begin(self) -> None:
            if self._head_timer is None:  # behind a request that is being answered still
                self._expect_head()
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._end_head()
            self._is_in_body = True
            super().on_headers_complete()

        def on_message_complete(self) -> None:
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

        def _refuse(self, status: bytes) -> None:
            self._end_head()
            if not self.transport.is_closing():
                if not self._is_in_body:  # else it has its answer
                    self.transport.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
                self.transport.close()

    return Bounded
