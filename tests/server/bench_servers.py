"""Servers for benchmarks to drive: one that counts words, and one that writes whatever bytes a test says."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from pelton.request import Request, TextEvent, Usage
from tests.server.scripted import ScriptedService

PER_PROMPT = 3
"""Tokens of every prompt beside its words."""
NUM_CHECKS = 3
"""Requests with which `find` gets to know a server."""


def words_of(request: Request) -> list[str]:
    """All that a client sent."""
    texts = [request.prompt] if request.messages is None else [str(m.content) for m in request.messages]
    return " ".join(text for text in texts if text).split()


@dataclass
class WordService(ScriptedService):
    """Counts each word of a prompt as a token, and PER_PROMPT more. `trouble` is what comes over it when it is known:
    values of `refuse` or `fail_after`."""

    trouble: dict[str, Any] = field(default_factory=dict)
    most_open: int = 0

    async def generate(self, request: Request) -> AsyncGenerator[TextEvent, None]:
        if len(self.requests) == NUM_CHECKS:
            self.__dict__.update(self.trouble)
        events = await super().generate(request)
        self.most_open = max(self.most_open, self.num_open)
        return events

    def usage(self, request: Request) -> Usage:
        return Usage(
            prompt_tokens=len(words_of(request)) + PER_PROMPT, completion_tokens=len(self.words), cached_tokens=2
        )

    @property
    def measured(self) -> list[Request]:
        """The requests after those that only ask how it counts."""
        return self.requests[NUM_CHECKS:]


class Dies(Exception):
    """Says that a raw server closes the connection in the middle."""


Answers = Callable[[dict[str, Any]], AsyncIterator[bytes]]


def chunk(text: str = "", finish: str | None = None, usage: tuple[int, int] | None = None) -> bytes:
    """One event of a stream of /v1/completions."""
    data: dict[str, Any] = {"choices": [{"text": text, "finish_reason": finish}]}
    if usage is not None:
        data = {"choices": [], "usage": {"prompt_tokens": usage[0], "completion_tokens": usage[1]}}
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def whole(body: dict[str, Any]) -> bytes:
    """The unstreamed answer, whose usage counts words."""
    count = len(body["prompt"].split())
    return json.dumps({"choices": [{"text": "a"}], "usage": {"prompt_tokens": count, "completion_tokens": 1}}).encode()


@contextlib.asynccontextmanager
async def raw(answers: Answers) -> AsyncIterator[str]:
    """The address of a server in this loop that answers each POST with these pieces."""

    tasks: set[asyncio.Task[Any]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with contextlib.closing(writer):
            await answered(reader, writer)

    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next(int(line[15:]) for line in head.splitlines() if line.lower().startswith("content-length:"))
        body = json.loads(await reader.readexactly(length) or b"null")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        with contextlib.suppress(Dies, ConnectionError):
            if head.startswith("GET"):
                writer.write(framed(json.dumps({"data": [{"id": "raw"}]}).encode()))
            elif not body.get("stream"):
                writer.write(framed(whole(body)))
            else:
                async for piece in answers(body):
                    writer.write(framed(piece))
                    await writer.drain()
            writer.write(b"0\r\n\r\n")

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def framed(piece: bytes) -> bytes:
    """As a chunk of HTTP."""
    return f"{len(piece):x}\r\n".encode() + piece + b"\r\n"
