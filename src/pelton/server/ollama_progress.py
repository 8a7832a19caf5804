"""How far work on models is, as Ollama's clients are told it: a line for each step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.types import ASGIApp

from pelton.pool import Loading, Progress
from pelton.server import ollama_types as wire
from pelton.server.answer import known
from pelton.server.ollama_reply import error_body
from pelton.server.wire import JSON, LINES, EventStream, json_line, unless_gone

TOLD_SECONDS = 0.1
"""Between two lines of one file's progress."""

Work = Callable[[Callable[[wire.OllamaStatus], None]], Awaitable[Any]]


async def told(http: HTTPRequest, is_stream: bool | None, ignored: list[str], work: Work) -> ASGIApp:
    """Do `work`, which tells how far it is: as lines, or the end alone, which lists what of the request was ignored.
    What is wrong before it has told anything has a status of its own. Where the client goes away, its work is given
    up."""
    queue: asyncio.Queue[wire.OllamaStatus | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def tell(status: wire.OllamaStatus) -> None:
        loop.call_soon_threadsafe(queue.put_nowait, status)

    task = asyncio.ensure_future(work(tell))
    task.add_done_callback(lambda _: tell_end())

    def tell_end() -> None:
        queue.put_nowait(None)

    success = wire.OllamaStatus(status="success", ignored_params=ignored or None)
    if is_stream is False:
        await unless_gone(http, task)
        return JSON(success)
    try:
        first = await unless_gone(http, queue.get())
        if first is None:
            await task
    except BaseException:
        task.cancel()
        raise

    async def lines() -> AsyncGenerator[bytes, None]:
        status = first
        while status is not None:
            yield json_line(status)
            status = await queue.get()
        await task
        yield json_line(success)

    async def close() -> None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    return EventStream(lines(), _failure, close, keep_alive=b"", media_type=LINES)


async def _failure(error: Exception) -> bytes:
    return json_line(error_body(known(error)))


class Teller:
    """A pull's progress in Ollama's words."""

    def __init__(self, tell: Callable[[wire.OllamaStatus], None]) -> None:
        self._tell = tell
        self._last = ("", 0.0)
        """What was told, and when."""

    def __call__(self, event: Progress | Loading) -> None:
        """What happened (called from another thread)."""
        if isinstance(event, Loading):
            return
        match event.phase:
            case "connect":
                status = "pulling manifest"
            case "download" | "unpack":
                status = f"pulling {event.file}"
            case "verify":
                status = "verifying sha256 digest"
            case "done":
                status = "writing manifest"
            case _:
                status = f"{event.source}: {event.phase}: {event.detail}"
        told, at = self._last
        if status == told and time.monotonic() < at + TOLD_SECONDS and event.done != event.total:
            return
        self._last = (status, time.monotonic())
        of_file = event.phase in ("download", "unpack", "verify")
        self._tell(
            wire.OllamaStatus(
                status=status,
                digest=f"sha256:{event.sha256}" if of_file and event.sha256 else None,
                total=event.total if of_file else None,
                completed=event.done if of_file else None,
            )
        )
