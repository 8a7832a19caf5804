"""The client of an engine: all of the engine that the service may import.

An `EngineClient` owns one engine, in a process of its own or (`in_process`) in the caller's thread, and gives each
request its stream of events. When the process dies, every request in flight ends in one `EngineDied` event and
the engine is started again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextvars import Context
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import msgspec

from pelton import errors
from pelton.config import EngineConfig
from pelton.engine import machine
from pelton.engine.link import LocalLink, Opening, ProcessLink, error_from
from pelton.engine.protocol import (
    Abort,
    Counters,
    EngineInfo,
    Events,
    Identified,
    Needs,
    Start,
    ToEngine,
    Unfold,
    Unpin,
    Vocabulary,
)
from pelton.formats.bounded_folder import BoundedFolder
from pelton.formats.digest import FileDigest
from pelton.request import Accepted, Done, EngineRequest, ErrorEvent, Event, Finish

log = logging.getLogger(__name__)

RESTART_WAIT = 30.0
"""Seconds that a request waits for an engine that is being started again, before it gets `Unavailable`."""
FIRST_BACKOFF = 0.1
"""Seconds before an engine that has died is started again; each further try waits twice as long."""
MAX_BACKOFF = 10.0


async def _all_that_is_free(needs: Needs) -> int:
    return machine.free_memory()


def error_of(event: ErrorEvent) -> errors.PeltonError:
    """The exception that an error event stands for."""
    return error_from(event.kind, event.message, event.param, event.retry_after)


class Link(Protocol):
    """One life of an engine, from its start to its end."""

    @property
    def pid(self) -> int | None:
        """Its process id while it has a process of its own."""
        ...

    async def open(self, opening: Opening) -> EngineInfo:
        """Start and load. Raises the error that loading ended in."""
        ...

    def send(self, message: ToEngine) -> None:
        """Queue a message; never blocks. Messages to an engine that has died are lost."""
        ...

    async def receive(self) -> Events | Identified:
        """The next step's events, or what was found out about the model. Raises `EngineDied` when the engine has
        ended."""
        ...

    async def close(self) -> None:
        """End the engine and give back what it holds. May be called twice."""
        ...


class EngineClient:
    """Runs one model. All methods belong to one event loop.

    Every stream ends in exactly one `Done` or `ErrorEvent`; its first event is `Accepted` or an `ErrorEvent`. Once it
    was accepted, each of its choices ends in one `Finish` before that, whatever dies.
    """

    def __init__(
        self,
        model_path: Path,
        config: EngineConfig,
        *,
        in_process: bool = False,
        draft_path: Path | None = None,
        known: tuple[FileDigest, ...] = (),
        packed: BoundedFolder | None = None,
        prefixes: BoundedFolder | None = None,
        remember: Callable[[tuple[FileDigest, ...]], None] = lambda files: None,
        is_shared: bool = False,
    ) -> None:
        """`draft_path`: of the model that drafts for it, if there is one. `known`: digests of both models' files; those
        that are not known are taken and given to `remember`. `packed`, `prefixes`: where packed weights and cached
        prefixes are kept for the next start. `is_shared`: memory is left to other models, unless the settings want all
        of it."""
        self.model_path = model_path
        self.config = config
        self.in_process = in_process
        self._begin = Start(
            str(model_path),
            config,
            known,
            packed,
            prefixes,
            is_shared=is_shared,
            draft_path=None if draft_path is None else str(draft_path),
        )
        self._remember = remember
        self._memory = 0
        """Bytes that the engine may take."""
        self.counters = Counters()
        self._info: EngineInfo | None = None
        self._link: Link | None = None
        self._ready = asyncio.Event()
        self._trouble: Exception | None = None
        self._streams: dict[str, asyncio.Queue[Event] | None] = {}
        """By request id; None: left by its reader, its end still to come."""
        self._unfold = Unfold()
        self._vocabulary: Vocabulary | None = None
        self._taught: Link | None = None
        """The engine that has been sent the vocabulary."""
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def info(self) -> EngineInfo:
        """What is loaded. Raises `Unavailable` before `start` has ended."""
        if self._info is None:
            raise errors.Unavailable(f"the engine of {self.model_path.name} has not been started")
        return self._info

    @property
    def pid(self) -> int | None:
        """The engine's process id; None while there is none, or in process."""
        return self._link.pid if self._link is not None else None

    async def start(self, opening: Opening | None = None) -> None:
        """Load the model; it may take all memory that is free where `opening` does not say. Raises what loading ended
        in."""
        opening = opening or Opening(_all_that_is_free)

        async def admit(needs: Needs) -> int:
            self._memory = await opening.admit(needs)
            return self._memory

        await self._open(replace(opening, admit=admit))
        # A context of its own: what the engine does later is not done for whoever it was started for.
        self._supervisor = asyncio.create_task(
            self._supervise(), name=f"engine {self.model_path.name}", context=Context()
        )

    @property
    def trouble(self) -> Exception | None:
        """Why the last try to start the engine again has failed; None: it runs, or was not tried."""
        return self._trouble

    def submit(self, request: EngineRequest) -> AsyncIterator[Event]:
        """The events of a request. A stream that is closed before its end aborts the request.

        Errors come as `ErrorEvent`s, never as exceptions. Two requests in flight cannot have one id.
        """
        return self._stream(request)

    @property
    def has_vocabulary(self) -> bool:
        """May requests have grammars?"""
        return self._vocabulary is not None

    def teach(self, vocabulary: Vocabulary) -> None:
        """What grammars are made of; before the first request with one. The engine is told when it needs it."""
        self._vocabulary, self._taught = vocabulary, None

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """End a request, or one of its choices; its stream goes on to `Finish(reason="abort")` and `Done`."""
        if self._link is not None and request_id in self._streams:
            self._link.send(Abort(request_id, choice))

    def unpin(self, request_id: str) -> None:
        """Pin the prompt of that request no longer."""
        left = tuple(pin for pin in self.counters.pins if pin.id != request_id)
        self.counters = msgspec.structs.replace(self.counters, pins=left)
        if self._link is not None:
            self._link.send(Unpin(request_id))

    async def close(self) -> None:
        """End the engine. Requests in flight get an `Unavailable` event."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
            self._supervisor = None
        if self._link is not None:
            await self._link.close()
            self._link = None
        self._ready.set()  # whoever waits for a restart is told that there will be none
        self._fail_streams("Unavailable", "the engine was closed")

    async def _open(self, opening: Opening) -> None:
        link = self._new_link()
        try:
            self._info = await link.open(opening)
            self._begin = msgspec.structs.replace(self._begin, files=self._info.files)
        except BaseException:
            await link.close()
            raise
        self._link = link
        self._trouble = None
        self._ready.set()

    def _new_link(self) -> Link:
        kind = LocalLink if self.in_process else ProcessLink
        return kind(self._begin)

    def _identify(self, found: Identified) -> None:
        self._begin = msgspec.structs.replace(self._begin, known=(*self._begin.known, *found.files))
        if found.fingerprint is not None:
            self._info = msgspec.structs.replace(self.info, fingerprint=found.fingerprint)
        asyncio.get_running_loop().run_in_executor(None, self._remember, found.files)  # it writes files

    async def _stream(self, request: EngineRequest) -> AsyncIterator[Event]:
        # A file that is not what it was will hardly become that again.
        patience = 0 if isinstance(self._trouble, errors.FormatError) else RESTART_WAIT
        try:
            async with asyncio.timeout(None if self._ready.is_set() else patience):
                while not self._ready.is_set():
                    await self._ready.wait()
        except TimeoutError:
            reason = "" if self._trouble is None else f", in vain so far: {self._trouble}"
            yield ErrorEvent(request.id, "Unavailable", f"the engine is being started again{reason}")
            return
        if self._link is None:
            yield ErrorEvent(request.id, "Unavailable", "the engine was closed")
            return
        if request.id in self._streams:
            yield ErrorEvent(request.id, "InvalidRequest", f"a request with id {request.id!r} is in flight")
            return
        queue: asyncio.Queue[Event] = asyncio.Queue()
        open_choices: set[int] = set()
        self._streams[request.id] = queue
        try:
            self._send(request)
            while True:
                event = await queue.get()
                match event:
                    case Accepted():
                        open_choices.update(range(request.sampling.n))
                    case Finish(choice=choice):
                        open_choices.discard(choice)
                    case ErrorEvent():
                        for choice in sorted(open_choices):
                            yield Finish(request.id, choice, "error")
                yield event
                if isinstance(event, Done | ErrorEvent):
                    return
        finally:
            if self._streams.get(request.id) is queue:  # left before its end, which is still to come
                self.abort(request.id)
                self._streams[request.id] = None

    def _send(self, request: EngineRequest) -> None:
        if self._link is None:
            return
        if request.is_constrained and self._taught is not self._link and self._vocabulary is not None:
            self._link.send(self._vocabulary)
            self._taught = self._link
        self._link.send(request)

    def _dispatch(self, message: Events | Identified) -> None:
        if isinstance(message, Identified):
            self._identify(message)
            return
        if message.counters is not None:
            self.counters = message.counters
        for event in self._unfold(message.events):
            queue = self._streams.get(event.request_id)
            if isinstance(event, Done | ErrorEvent):
                self._streams.pop(event.request_id, None)
            if queue is not None:
                queue.put_nowait(event)

    def _fail_streams(self, kind: str, message: str) -> None:
        for request_id, queue in self._streams.items():
            if queue is not None:
                queue.put_nowait(ErrorEvent(request_id, kind, message))
        self._streams.clear()

    async def _supervise(self) -> None:
        """Hand out events; when the engine dies, fail what was in flight and start it again, for ever."""
        loop = asyncio.get_running_loop()
        backoff = FIRST_BACKOFF
        while self._link is not None:
            opened = loop.time()
            try:
                while True:
                    self._dispatch(await self._link.receive())
            except errors.EngineDied as error:
                reason = error.message
            except Exception as error:  # an engine in this thread that cannot go on, or bytes that are no message
                log.exception("the engine failed")
                reason = f"the engine failed: {error}"
            log.error("%s", reason)
            self._ready.clear()
            self.counters = Counters()
            self._fail_streams("EngineDied", reason)
            await self._link.close()
            if loop.time() - opened > MAX_BACKOFF:
                backoff = FIRST_BACKOFF
            await self._reopen(backoff)
            backoff = min(2 * backoff, MAX_BACKOFF)

    async def _same_memory(self, needs: Needs) -> int:
        """What it had before it died: it takes the same again."""
        return self._memory

    async def _reopen(self, backoff: float) -> None:
        while not self._ready.is_set():
            await asyncio.sleep(backoff)
            try:
                await self._open(Opening(self._same_memory))
            except Exception as error:  # also the system's: no process, no file descriptor is left
                backoff = min(2 * backoff, MAX_BACKOFF)
                self._trouble = error
                log.error("the engine could not be started again: %s", error)
