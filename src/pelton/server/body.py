"""The bounds of request bodies: how large, how slow, and none that are still to come while the server drains."""

from __future__ import annotations

import asyncio
import math

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope

from pelton.errors import RequestTooLarge, SlowRequest, Unavailable

SLOWEST = 16 << 10
"""Bytes that must come in a second on the long run."""


class Bounds:
    """What bodies may be. After `drain` none is waited for."""

    def __init__(self, max_bytes: int, seconds: float) -> None:
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._drains = asyncio.Event()

    @property
    def is_draining(self) -> bool:
        """Are bodies not waited for any more?"""
        return self._drains.is_set()

    def drain(self) -> None:
        """Wait for no body from now on: one that never comes could keep the server from ending."""
        self._drains.set()

    def bound(self, scope: Scope, receive: Receive, *, is_file: bool = False) -> Receive:
        """`receive`, which refuses a body that is over the bound, says its header or not, one that has not come in its
        time, and one that is still to come when the server drains. `is_file`: it may be of any size."""
        max_bytes = math.inf if is_file else self._max_bytes
        if (told := Headers(scope=scope).get("content-length", "")).isdigit() and int(told[:20]) > max_bytes:
            raise self._too_large()
        num_bytes = 0
        is_complete = False
        clock = asyncio.get_running_loop().time
        began = clock()

        async def bounded() -> Message:
            nonlocal num_bytes, is_complete
            if is_complete:
                return await receive()
            message = await self._in_time(receive, began + self._seconds + num_bytes / SLOWEST - clock())
            is_complete = not message.get("more_body", False)
            num_bytes += len(message.get("body", b""))
            if num_bytes > max_bytes:
                raise self._too_large()
            return message

        return bounded

    def _too_large(self) -> RequestTooLarge:
        return RequestTooLarge(f"the body is larger than {self._max_bytes} bytes")

    async def _in_time(self, receive: Receive, seconds: float) -> Message:
        message = asyncio.ensure_future(receive())
        drains = asyncio.ensure_future(self._drains.wait())
        try:
            await asyncio.wait((message, drains), timeout=max(0.0, seconds), return_when=asyncio.FIRST_COMPLETED)
            if message.done():
                return message.result()
            if drains.done():
                raise Unavailable("the server is shutting down")
            raise SlowRequest("the body did not come in time")
        finally:
            message.cancel()
            drains.cancel()
