"""What stands before every route, as pure ASGI: request ids, the bound on bodies, and no new work while draining."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pelton.errors import PeltonError, RequestTooLarge, Unavailable

_GOOD_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
ErrorWriter = Callable[[PeltonError, Scope, Receive, Send], Awaitable[None]]


class Guard:
    """The outermost layer. After `drain` new work is refused with 503, and so is a request whose body has not all
    come: it could keep a server from ending. `num_active` counts answers under way."""

    def __init__(self, app: ASGIApp, *, max_body: int, write_error: ErrorWriter) -> None:
        self._app = app
        self._max_body = max_body
        self._write_error = write_error
        self._drains = asyncio.Event()
        self.num_active = 0

    @property
    def is_draining(self) -> bool:
        """Is new work refused?"""
        return self._drains.is_set()

    def drain(self) -> None:
        """Refuse new work from now on."""
        self._drains.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _GOOD_ID.fullmatch(given) else secrets.token_hex(12)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        self.num_active += 1
        try:
            if self.is_draining and scope["path"] != "/health":
                raise Unavailable("the server is shutting down")
            if (
                headers.get("content-length", "0").isdigit()
                and int(headers.get("content-length", "0")) > self._max_body
            ):
                raise RequestTooLarge(f"the body is larger than {self._max_body} bytes")
            await self._app(scope, self._bounded(receive), send_with_id)
        except (RequestTooLarge, Unavailable) as error:
            await self._write_error(error, scope, receive, send_with_id)
        finally:
            self.num_active -= 1

    def _bounded(self, receive: Receive) -> Receive:
        """`receive`, which refuses a body that grows past the bound whatever its headers said, or that is still to
        come when the server drains."""
        total = 0
        is_complete = False

        async def bounded() -> Message:
            nonlocal total, is_complete
            message = await (receive() if is_complete else self._unless_draining(receive))
            is_complete = not message.get("more_body", False)
            total += len(message.get("body", b""))
            if total > self._max_body:
                raise RequestTooLarge(f"the body is larger than {self._max_body} bytes")
            return message

        return bounded

    async def _unless_draining(self, receive: Receive) -> Message:
        message = asyncio.ensure_future(receive())
        drains = asyncio.ensure_future(self._drains.wait())
        try:
            await asyncio.wait((message, drains), return_when=asyncio.FIRST_COMPLETED)
            if not message.done():
                raise Unavailable("the server is shutting down")
            return message.result()
        finally:
            message.cancel()
            drains.cancel()
