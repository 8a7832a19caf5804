"""Streams on the wire, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.requests import Request

from pelton.errors import InvalidRequest
from pelton.server import wire
from pelton.server.answer import using


def run(chunks: AsyncGenerator[bytes, None], *, leaves_after: float | None = None) -> list[bytes]:
    """The pieces of a body, from a client that stays, or leaves after so many seconds."""
    pieces: list[bytes] = []
    closed: list[bool] = []

    async def receive() -> MutableMapping[str, Any]:
        await asyncio.sleep(30 if leaves_after is None else leaves_after)
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.body":
            pieces.append(message["body"])

    async def failure(error: Exception) -> bytes:
        return f"failed: {error}".encode()

    async def close() -> None:
        closed.append(True)

    stream = wire.EventStream(chunks, failure, close)
    asyncio.run(stream({}, receive, send))
    assert closed == [True]
    return pieces


async def slow(*pauses: float) -> AsyncGenerator[bytes, None]:
    for i, pause in enumerate(pauses):
        await asyncio.sleep(pause)
        yield b"%d" % i


def test_pauses_are_filled_so_that_proxies_keep_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "KEEP_ALIVE_SECONDS", 0.2)
    pieces = run(slow(0, 0.9, 0, 0))
    assert pieces[0] == b"0"
    filled = pieces[1 : pieces.index(b"1")]
    assert set(filled) == {wire.KEEP_ALIVE}
    assert 2 <= len(filled) <= 4
    assert pieces[pieces.index(b"1") :] == [b"1", b"2", b"3", b""]


def test_a_stream_without_pauses_has_nothing_but_its_pieces() -> None:
    assert run(slow(0, 0, 0)) == [b"0", b"1", b"2", b""]


def test_a_failure_is_the_last_piece() -> None:
    async def fails() -> AsyncGenerator[bytes, None]:
        yield b"0"
        raise ValueError("broken")

    assert run(fails()) == [b"0", b"failed: broken", b""]


def test_a_client_that_leaves_ends_the_stream() -> None:
    assert run(slow(0, 20), leaves_after=0.1) == [b"0"]


def test_nobody_waits_for_a_model_whose_client_has_gone() -> None:
    class Loading:
        num_waiting = 0

        @asynccontextmanager
        async def use(self, name: str, *, keep_alive: float | None) -> AsyncIterator[None]:
            self.num_waiting += 1
            try:
                await asyncio.sleep(30)
                yield
            finally:
                self.num_waiting -= 1

    models = Loading()

    async def receive() -> MutableMapping[str, Any]:
        while not models.num_waiting:
            await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    async def ask() -> None:
        async with using(models, Request({"type": "http"}, receive), "m"):  # type: ignore[arg-type]
            pass

    with pytest.raises(InvalidRequest, match="went away"):
        asyncio.run(asyncio.wait_for(ask(), 5))
    assert models.num_waiting == 0
