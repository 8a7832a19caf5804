"""The server's own operations, asked from inside of it: what an HTTP request would be answered, without HTTP."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from starlette.types import ASGIApp, Message, Scope

from pelton.server.context import Context, enter


class Reply(NamedTuple):
    """How an operation has answered."""

    status: int
    body: bytes


class Inside:
    """Asks operations. `app`: what stands behind the guard."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def post(self, path: str, body: bytes, context: Context) -> Reply:
        """The answer to a POST of this JSON on behalf of `context`. In a task of its own: what runs there and in the
        tasks that it starts belongs to that context."""
        return await asyncio.create_task(self._post(path, body, context))

    async def _post(self, path: str, body: bytes, context: Context) -> Reply:
        enter(context)
        request: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        status = 500
        chunks: list[bytes] = []

        async def receive() -> Message:
            if not request:
                await asyncio.get_running_loop().create_future()  # this client does not go away
            return request.pop()

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                chunks.append(message.get("body", b""))

        try:
            await self._app(_scope(path), receive, send)
        except Exception:
            if not chunks:  # else it has been answered, and logged
                raise
        return Reply(status, b"".join(chunks))


def _scope(path: str) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "server": None,
    }
