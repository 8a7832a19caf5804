"""Responses that run on when their request has been answered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

from pelton.errors import PeltonError, Unavailable
from pelton.request import Request, TextEvent
from pelton.server.answer import IndexedStream, chunks, known
from pelton.server.context import current
from pelton.server.models import Models
from pelton.server.responses_reply import ResponseReply
from pelton.server.responses_store import ResponseStore, not_stored, sees
from pelton.server.responses_types import Response

ACCEPT_SECONDS = 5.0
"""How long the answer waits for the engine to take the request, so that what is wrong with it is said at once."""
KEPT_SECONDS, MAX_KEPT, MAX_KEPT_BYTES = 300.0, 64, 64 << 20
"""How long, of how many responses, and how many bytes of events can be read again after the end. What the store could
not take stays as long as there is room; after that it has failed."""


class Log:
    """The events of one response, as bytes."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._events: list[bytes] = []
        self._is_over = False
        self._changed = asyncio.Event()

    def add(self, event: bytes) -> None:
        """The next one."""
        self._events.append(event)
        self.num_bytes += len(event)
        self._wake()

    def end(self) -> None:
        """There are no more."""
        self._is_over = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def follow(self, start: int) -> AsyncGenerator[bytes, None]:
        """All from the one of this number on, as they come."""
        while True:
            while start < len(self._events):
                yield self._events[start]
                start += 1
            if self._is_over:
                return
            await self._changed.wait()


class Run:
    """One response under way, or ended not long ago. `reply` is set before it starts."""

    reply: ResponseReply

    def __init__(self, id: str) -> None:
        self.id = id
        self.log = Log()
        self.key_id = current().key.id
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.task: asyncio.Task[None] | None = None
        self.is_cancelled = False
        """Does the client want it no more?"""
        self.final: Response | None = None
        """As it ended."""
        self.is_saved = True
        """Does the store have that?"""
        self._is_stopped = False

    def stop(self) -> None:
        """End it, unless it is ending: what cut off that would leave it without an end, in the store and for those who
        follow it."""
        if self.task is not None and self.final is None and not self._is_stopped:
            self._is_stopped = True
            self.task.cancel()


class Background:
    """All of this server."""

    def __init__(self, models: Models, stored: ResponseStore) -> None:
        self._models = models
        self._stored = stored
        self._runs: dict[str, Run] = {}
        self._ended: dict[str, Run] = {}

    @property
    def num_running(self) -> int:
        """Those under way."""
        return len(self._runs)

    async def start(self, run: Run, request: Request) -> None:
        """Run it, from now on on its own. Raises what is wrong with it, where that is known soon."""
        self._runs[run.id] = run
        run.task = asyncio.create_task(self._run(run, request))
        run.task.add_done_callback(lambda _: self._over(run))
        try:
            await asyncio.wait((run.accepted, run.task), timeout=ACCEPT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if run.accepted.done():
                run.accepted.result()
        except BaseException:
            run.is_cancelled = True
            run.stop()
            raise

    async def _run(self, run: Run, request: Request) -> None:
        reply = run.reply
        try:
            async with self._models.use(request.model) as service:
                reply.fingerprint = service.fingerprint
                stream = await self._models.meter.begin(service, request)
                run.accepted.set_result(None)
                async with aclosing(chunks(reply, _single(stream), 1)) as written:
                    async for _ in written:
                        pass
        except asyncio.CancelledError:
            if run.is_cancelled:
                await reply.cancel()
            else:
                await reply.failure(Unavailable("the server ended while this response was under way: ask again"))
        except Exception as error:
            await reply.failure(known(error))
            if not run.accepted.done():
                run.accepted.set_exception(known(error))
                run.accepted.exception()  # it may come when nobody waits any more
        finally:
            run.log.end()

    async def save(self, run: Run, response: Response) -> Response:
        """Store a response that has ended, and give it as it is told. Where it cannot be stored, it stays in memory for
        a while."""
        run.final = response
        try:
            await self._stored.update(response)
        except PeltonError as error:
            run.is_saved = False
            return not_stored(response, error)
        run.is_saved = True
        return response

    def _over(self, run: Run) -> None:
        self._runs.pop(run.id, None)
        self._ended[run.id] = run
        while len(self._ended) > MAX_KEPT or sum(each.log.num_bytes for each in self._ended.values()) > MAX_KEPT_BYTES:
            gone = min(self._ended.values(), key=lambda each: not each.is_saved)  # the oldest of those that are
            self.forget(gone.id)
        with suppress(RuntimeError):  # the event loop has ended, too
            asyncio.get_running_loop().call_later(KEPT_SECONDS, self._expire, run)

    def _expire(self, run: Run) -> None:
        if run.is_saved:
            self._ended.pop(run.id, None)

    def running(self, id: str) -> Run | None:
        """One under way that the caller may see."""
        return self._seen(self._runs.get(id))

    async def unsaved(self, id: str) -> Response | None:
        """One that has ended and could not be stored, that the caller may see. It is tried once more."""
        run = self._seen(self._ended.get(id))
        return None if run is None or run.is_saved or run.final is None else await self.save(run, run.final)

    def events(self, id: str) -> Log | None:
        """Those of one under way, or of one that has ended not long ago."""
        run = self._seen(self._runs.get(id) or self._ended.get(id))
        return None if run is None else run.log

    def _seen(self, run: Run | None) -> Run | None:
        return run if run is not None and sees(current().key, run.key_id) else None

    async def cancel(self, run: Run) -> Response:
        """End it, and give what has come of it."""
        assert run.task is not None
        run.is_cancelled = True
        run.stop()
        await asyncio.wait((run.task,))
        return run.final or run.reply.now()

    def forget(self, id: str) -> None:
        """Keep nothing of one that has ended. Where it is not saved, either, it has failed."""
        if self._ended.pop(id, None) is not None:
            self._stored.let_go(id)

    async def close(self) -> None:
        """The server ends: so do all that are under way."""
        runs = list(self._runs.values())
        for run in runs:
            run.stop()
        await asyncio.gather(*(run.task for run in runs if run.task is not None), return_exceptions=True)


async def _single(stream: AsyncGenerator[TextEvent, None]) -> IndexedStream:
    async with aclosing(stream):
        async for event in stream:
            yield 0, event
