"""Typed JSON in, server-sent events or lines of JSON out: what dialects need of HTTP and nothing of any of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing
from itertools import islice
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from pelton.errors import ClientGone, InvalidRequest

S = TypeVar("S", bound=msgspec.Struct)
A = TypeVar("A")

MAX_DEPTH = 128
"""Of lists and objects in a body."""
MAX_UNKNOWN = 1000
"""Fields of a body that its type does not know."""
KEEP_ALIVE_SECONDS = 15.0
_HOLDERS = frozenset((dict, list))
_json = msgspec.json.Encoder()


class JSON(Response):
    """A JSON answer from any msgspec-encodable value."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body's bytes."""
        return _json.encode(content)


async def read(request: Request, wire_type: type[S]) -> tuple[S, dict[str, Any]]:
    """The body as `wire_type`, and what the type does not know, by its path ("colour", "messages[2].colour").

    Raises `InvalidRequest` that names the field, for bytes that are no JSON, a wrong type or too deep a nesting.
    """
    try:
        body = await request.body()
    except ClientDisconnect:
        raise ClientGone("the client went away before its request had arrived") from None
    try:
        plain = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {_short(error)}") from None
    if not isinstance(plain, dict):
        raise InvalidRequest("the body must be a JSON object")
    _check_depth(plain)
    try:
        value = msgspec.convert(plain, wire_type)
    except msgspec.ValidationError as error:
        raise _misfit(error, "body") from None
    unknown = dict(islice(_unknown(plain, wire_type, ""), MAX_UNKNOWN + 1))
    if len(unknown) > MAX_UNKNOWN:
        raise InvalidRequest(f"the body has over {MAX_UNKNOWN} unknown fields, {_short(next(iter(unknown)))} the first")
    return value, unknown


def read_query(request: Request, wire_type: type[S]) -> tuple[S, list[str]]:
    """The query as `wire_type`, and the names that the type does not know. Raises `InvalidRequest` that names the
    parameter."""
    plain = dict(request.query_params)
    unknown = plain.keys() - {field.encode_name for field in msgspec.structs.fields(wire_type)}
    try:
        return msgspec.convert(plain, wire_type, strict=False), sorted(unknown)
    except msgspec.ValidationError as error:
        raise _misfit(error, "query") from None


def _misfit(error: msgspec.ValidationError, whole: str) -> InvalidRequest:
    """What does not fit its type, with the field's path; `whole`: what that begins in."""
    message, _, path = str(error).replace(" - at `key` in `$", " - at `$").partition(" - at `$")
    return InvalidRequest(_short(f"{path.strip('`.') or whole}: {message}"), param=_param(path))


def _check_depth(plain: Any) -> None:
    """Refuse what walks over it, here or below, could not walk over."""
    level = [plain]
    for _ in range(MAX_DEPTH):
        items = [each.values() if isinstance(each, dict) else each for each in level]
        # Lists of millions of numbers are passed over without a step of Python for each.
        holders = [each for each in items if not _HOLDERS.isdisjoint(map(type, each))]
        level = [item for each in holders for item in each if type(item) in _HOLDERS]
        if not level:
            return
    raise InvalidRequest(f"the body is nested more than {MAX_DEPTH} deep")


def _unknown(plain: Any, kind: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Fields that a type does not know, also those inside of structs in it and in lists of them. Null says nothing."""
    if isinstance(plain, dict) and isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        fields = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
        if (tag_field := kind.__struct_config__.tag_field) is not None:
            if plain.get(tag_field) != kind.__struct_config__.tag:
                return  # another one of a union is meant
            fields[tag_field] = str
        for name, value in plain.items():
            if name in fields:
                dot = "" if isinstance(value, list) else "."
                yield from _unknown(value, fields[name], f"{path}{name}{dot}")
            elif value is not None:
                yield _short(f"{path}{name}", 200), value
    elif isinstance(plain, list) and get_origin(kind) is list and _has_structs(item := get_args(kind)[0]):
        for i, each in enumerate(plain):
            yield from _unknown(each, item, f"{path}[{i}].")
    elif isinstance(kind, UnionType):
        for option in get_args(kind):
            yield from _unknown(plain, option, path)


def _has_structs(kind: Any) -> bool:
    return (isinstance(kind, type) and issubclass(kind, msgspec.Struct)) or any(map(_has_structs, get_args(kind)))


def _short(text: object, limit: int = 300) -> str:
    line = str(text)
    return line if len(line) <= limit else line[:limit] + "..."


def _param(path: str) -> str | None:
    name = path.strip("`.").split(".")[0].split("[")[0]
    return name or None


def sse(value: Any, event: str = "") -> bytes:
    """One server-sent event, with its name where the dialect names them."""
    name = f"event: {event}\n".encode() if event else b""
    return name + b"data: " + _json.encode(value) + b"\n\n"


def json_line(value: Any) -> bytes:
    """One line of JSON."""
    return _json.encode(value) + b"\n"


EVENTS = "text/event-stream; charset=utf-8"
LINES = "application/x-ndjson"
"""Media types of streams: server-sent events, and lines of JSON."""
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which clients skip."""


class EventStream:
    """An ASGI answer that streams `chunks` and stops them when the client goes away.

    The status line leaves with the first chunk: whatever could be wrong with the request has been answered before.
    `failure` turns an exception in mid-stream into the last event; `close` is awaited when all is over; `keep_alive` is
    said while nothing comes.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        failure: Callable[[Exception], Awaitable[bytes]],
        close: Callable[[], Awaitable[None]],
        keep_alive: bytes = KEEP_ALIVE,
        media_type: str = EVENTS,
    ) -> None:
        self._media_type = media_type
        self._chunks = chunks
        self._failure = failure
        self._close = close
        self._keep_alive = keep_alive
        self._told = 0.0
        """When the last bytes left, by the event loop's clock."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the answer (ASGI)."""
        writer = asyncio.ensure_future(self._write(send))
        watcher = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait((writer, watcher), return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _cancel(writer, watcher)
            await self._close()

    async def _write(self, send: Send) -> None:
        headers = [(b"content-type", self._media_type.encode()), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self._told = asyncio.get_running_loop().time()
        keeper = asyncio.ensure_future(self._keep(send))  # one for all pieces: a timer for each would cost more
        try:
            await self._write_chunks(send)
        finally:
            await _cancel(keeper)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write_chunks(self, send: Send) -> None:
        now = asyncio.get_running_loop().time
        async with aclosing(self._chunks) as chunks:
            try:
                async for chunk in chunks:
                    if chunk:
                        self._told = now()
                        await send({"type": "http.response.body", "body": chunk, "more_body": True})
            except Exception as error:
                last = await self._failure(error)
                await send({"type": "http.response.body", "body": last, "more_body": True})

    async def _keep(self, send: Send) -> None:
        """Say something while nothing comes, so that proxies keep the connection."""
        now = asyncio.get_running_loop().time
        while self._keep_alive:
            await asyncio.sleep(self._told + KEEP_ALIVE_SECONDS - now())
            if now() >= self._told + KEEP_ALIVE_SECONDS:
                self._told = now()
                await send({"type": "http.response.body", "body": self._keep_alive, "more_body": True})


class Closing:
    """An ASGI answer after which something is closed."""

    def __init__(self, answer: ASGIApp, close: Callable[[], Awaitable[None]]) -> None:
        self._answer = answer
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the answer (ASGI)."""
        try:
            await self._answer(scope, receive, send)
        finally:
            await self._close()


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    """End tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, work: Awaitable[A]) -> A:
    """The result of `work`, which is cancelled when the client goes away first."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone("the client went away")
        return task.result()
    finally:
        await _cancel(task, watcher)
