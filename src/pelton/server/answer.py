"""One answer, whatever the dialect: start its requests, then stream what comes or fold it into one piece."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.types import ASGIApp

from pelton.errors import InternalError, InvalidRequest, PeltonError
from pelton.folding import Choice, summed
from pelton.request import (
    Request,
    SamplingParams,
    TextDelta,
    TextDone,
    TextEvent,
    TextFinish,
    TextPrompt,
    ToolCallBegin,
    ToolCallDelta,
    ToolCallEnd,
    Usage,
)
from pelton.server.context import current
from pelton.server.models import Models
from pelton.server.wire import EVENTS, JSON, Closing, EventStream, unless_gone

if TYPE_CHECKING:
    from pelton.service import Service

MAX_CHOICES = 1024
"""Of one answer."""
log = logging.getLogger("pelton.server")

TextStream = AsyncGenerator[TextEvent, None]
ToolCallEvent = ToolCallBegin | ToolCallDelta | ToolCallEnd
IndexedStream = AsyncGenerator[tuple[int, TextEvent], None]


class Reply(Protocol):
    """How a dialect writes one answer. Choices are numbered over all requests of the answer."""

    is_stream: bool
    num_choices: int
    """Choices of each request."""
    fingerprint: str | None
    """Set once the model's service is known; None while its file's digest is not."""
    keep_alive: bytes
    """What a stream says while nothing comes; empty where the dialect has no words for that."""

    def opening(self, index: int) -> bytes:
        """What a stream begins with for this choice."""
        ...

    def prompt(self, index: int, prompt: TextPrompt) -> bytes:
        """What a stream tells of this choice's prompt, before its first piece."""
        ...

    def delta(self, index: int, delta: TextDelta) -> bytes:
        """A piece of a stream; empty where there is nothing to say."""
        ...

    def tool_call(self, index: int, event: ToolCallEvent) -> bytes:
        """The beginning, a piece or the end of a tool call; empty where there is nothing to say."""
        ...

    def finish(self, index: int, finish: TextFinish) -> bytes:
        """The last piece of a choice."""
        ...

    async def ending(self, usage: Usage) -> bytes:
        """The end of a stream that went well. It may wait for what is to be written down before."""
        ...

    async def failure(self, error: PeltonError) -> bytes:
        """The end of a stream that did not."""
        ...

    async def whole(self, choices: Sequence[Choice], usage: Usage) -> Any:
        """The answer in one piece."""
        ...


_SAMPLING = frozenset(field.name for field in msgspec.structs.fields(SamplingParams))
MAX_IGNORED = 32
"""Names of ignored fields that an answer lists: a dialect's chunks may repeat them."""


def ignored_params(extras: dict[str, Any], not_offered: Mapping[str, Sequence[Any]]) -> list[str]:
    """Names of the fields that change nothing here. Raises `InvalidRequest` for one that would: one of `not_offered`
    with none of the values given there, which ask for nothing; and for all where parameters are strict."""
    for name, values in not_offered.items():
        if name in extras and extras[name] not in values:
            raise InvalidRequest(f"{name} is not supported by this server", param=name)
    ignored = sorted(name for name in extras if name not in not_offered)
    current().refuse_ignored(ignored)
    more = [f"... and {len(ignored) - MAX_IGNORED} more"] if len(ignored) > MAX_IGNORED else []
    return ignored[:MAX_IGNORED] + more


def left_open(given: Iterable[str]) -> tuple[str, ...]:
    """`Request.left_open` of one whose client has set these fields of `SamplingParams`."""
    return tuple(sorted(_SAMPLING.difference(given)))


def arguments_object(arguments: str) -> dict[str, Any]:
    """A call's arguments as an object. What is none, cut or broken, stands inside one under the name that Anthropic's
    guide to streaming proposes."""
    try:
        given = msgspec.json.decode(arguments or "{}")
    except msgspec.DecodeError:
        given = None
    return given if isinstance(given, dict) else {"INVALID_JSON": arguments}


@asynccontextmanager
async def using(
    models: Models, http: HTTPRequest, name: str, *, keep_alive: float | None = None
) -> AsyncIterator[Service]:
    """`Models.use` for a client: where it goes away while the model is loaded, nobody waits for that any more."""
    async with AsyncExitStack() as stack:
        yield await unless_gone(http, stack.enter_async_context(models.use(name, keep_alive=keep_alive)))


async def answer(
    models: Models,
    http: HTTPRequest,
    reply: Reply,
    requests: Sequence[Request],
    after: Callable[[], Awaitable[None]] | None = None,
    *,
    media_type: str = EVENTS,
) -> ASGIApp:
    """Start all requests, which share one answer. What is wrong with them is raised here, before any status line.
    `after` is awaited when the answer is out or has failed; the model is in use until then. `media_type`: of a
    stream."""
    count = len(requests) * reply.num_choices
    if count > MAX_CHOICES:
        message = f"{len(requests)} prompts with n of {reply.num_choices} each are {count} choices, over {MAX_CHOICES}"
        raise InvalidRequest(message, param="n")
    async with AsyncExitStack() as stack:
        service = await stack.enter_async_context(using(models, http, requests[0].model))
        if after is not None:
            stack.push_async_callback(after)
        reply.fingerprint = service.fingerprint
        streams = await unless_gone(http, _start([models.meter.begin(service, request) for request in requests]))
        stack.push_async_callback(_close, streams)
        events = _merge(streams, reply.num_choices)
        if not reply.is_stream:
            whole = JSON(await unless_gone(http, _fold(reply, events, count)))
            return Closing(whole, stack.pop_all().aclose)
        pieces = chunks(reply, events, count)
        # The model is in use until the stream has ended.
        return EventStream(
            pieces,
            lambda error: reply.failure(known(error)),
            stack.pop_all().aclose,
            keep_alive=reply.keep_alive,
            media_type=media_type,
        )


def known(error: Exception) -> PeltonError:
    """The error as clients may see it."""
    if isinstance(error, PeltonError):
        return error
    log.error("an answer failed inside the server", exc_info=error)
    return InternalError("the server failed while it answered; its log says why")


async def _start(starting: Sequence[Coroutine[Any, Any, TextStream]]) -> list[TextStream]:
    """Await every request's acceptance; if one is refused, or the client goes away, the others are given up."""
    tasks = [asyncio.create_task(each) for each in starting]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await _close([result for result in results if not isinstance(result, BaseException)])
        raise


async def _close(streams: Sequence[TextStream]) -> None:
    """Give up what has not ended, also where nobody has begun to read it."""
    for stream in streams:
        await stream.aclose()


async def _merge(streams: Sequence[TextStream], num_choices: int) -> IndexedStream:
    """(index of the answer's choice, event) of all streams, as they come."""
    queue: asyncio.Queue[tuple[int, TextEvent] | Exception | None] = asyncio.Queue(maxsize=64)

    async def pump(i: int, stream: TextStream) -> None:
        try:
            async with aclosing(stream):
                async for event in stream:
                    await queue.put((i * num_choices + getattr(event, "choice", 0), event))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    if len(streams) == 1:
        async with aclosing(streams[0]):
            async for event in streams[0]:
                yield getattr(event, "choice", 0), event
        return
    tasks = [asyncio.create_task(pump(i, stream)) for i, stream in enumerate(streams)]
    try:
        num_running = len(tasks)
        while num_running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def chunks(reply: Reply, events: IndexedStream, count: int) -> AsyncGenerator[bytes, None]:
    """The bytes of a stream. The first piece is there at once: the status line does not wait for a token."""
    usage = Usage()
    async with aclosing(events):
        yield b"".join(reply.opening(i) for i in range(count))
        async for index, event in events:
            match event:
                case TextPrompt():
                    yield b"".join(reply.prompt(i, event) for i in range(index, index + reply.num_choices))
                case TextDelta():
                    yield reply.delta(index, event)
                case ToolCallBegin() | ToolCallDelta() | ToolCallEnd():
                    yield reply.tool_call(index, event)
                case TextFinish(reason="error"):
                    pass  # no dialect has such a reason: the failure that follows says it
                case TextFinish():
                    yield reply.finish(index, event)
                case TextDone():
                    usage = summed(usage, event.usage)
        yield await reply.ending(usage)


async def _fold(reply: Reply, events: IndexedStream, count: int) -> Any:
    """The answer in one piece."""
    usage = Usage()
    choices = [Choice() for _ in range(count)]
    async with aclosing(events):
        async for index, event in events:
            match event:
                case TextPrompt():
                    for choice in choices[index : index + reply.num_choices]:
                        choice.prompt = event
                case TextDone():
                    usage = summed(usage, event.usage)
                case _:
                    choices[index].add(event)
    return await reply.whole(choices, usage)
