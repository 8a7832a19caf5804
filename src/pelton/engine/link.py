"""The two ways to hold an engine: as a child process behind a socket, or in the caller's thread."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from pelton import errors
from pelton.engine.child import Child
from pelton.engine.protocol import (
    LENGTH_BYTES,
    Abort,
    EngineInfo,
    Events,
    Failed,
    FromEngine,
    Grant,
    Identified,
    Needs,
    Planned,
    Progress,
    Ready,
    Start,
    Stop,
    ToEngine,
    Unpin,
    Vocabulary,
    framed,
)
from pelton.request import EngineRequest

if TYPE_CHECKING:
    from pelton.engine.engine import Engine

READ_AHEAD = 1 << 20
"""Bytes of messages that are read before anybody wants them."""
STOP_GRACE = 2.0
"""Seconds between asking a process to end and killing it."""
MIN_HEARTBEAT_TIMEOUT = 2.0
"""Signs of life come once a second."""
SECOND_LOOK = 0.5
"""Seconds more in which a sign of life may be found, before an engine counts as dead."""


@dataclass(frozen=True)
class Opening:
    """What an engine that is being opened is given and tells."""

    admit: Callable[[Needs], Awaitable[int]]
    """Asked once, when it is known what the model needs: the bytes that it may take."""
    settle: Callable[[int, int | None], None] = lambda memory, pid: None
    """Told how many of them it takes, before it takes them, and its process id, if it has a process of its own."""
    progress: Callable[[float], None] = lambda share: None
    """Told the share that is loaded, 0 to 1."""
    child: Child | None = None
    """A process that was begun before; the engine has it from now on. None: one is begun."""


def error_from(
    kind: str, message: str, param: str | None = None, retry_after: float | None = None
) -> errors.PeltonError:
    """An exception by the name of its class in `errors`; `InternalError` for a name that is not there."""
    found = getattr(errors, kind, None)
    if isinstance(found, type) and issubclass(found, errors.PeltonError):
        return found(message, param=param, retry_after=retry_after)
    return errors.InternalError(f"{kind}: {message}", param=param)


class ProcessLink:
    """An engine in a process of its own."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self._heartbeat_timeout = start.config.heartbeat_timeout
        self._length: int | None = None
        """Of the message that is coming, once that is known."""
        self._child: Child | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._death: asyncio.Task[int] | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)

    @property
    def pid(self) -> int | None:
        """The process id while it lives."""
        return None if self._child is None else self._child.pid

    async def open(self, opening: Opening) -> EngineInfo:
        """Start the process and load the model."""
        if not self._heartbeat_timeout >= MIN_HEARTBEAT_TIMEOUT:
            raise errors.ConfigError(
                f"heartbeat_timeout is {self._heartbeat_timeout}, must be at least {MIN_HEARTBEAT_TIMEOUT:g} seconds",
                param="heartbeat_timeout",
            )
        self._child = opening.child or Child()
        self._death = asyncio.create_task(self._child.ended())
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._child.socket, limit=READ_AHEAD)
        self.send(self._start)
        while True:
            match await self._next():
                case Needs() as needs:
                    self.send(Grant(await opening.admit(needs)))
                case Planned(memory=memory):
                    opening.settle(memory, self.pid)
                case Progress(share=share):
                    opening.progress(share)
                case Failed(kind=kind, message=message):
                    raise error_from(kind, message)
                case Ready(info=info):
                    return info

    def send(self, message: ToEngine) -> None:
        """Queue a message; never blocks."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(framed(self._encoder.encode(message)))

    async def receive(self) -> Events | Identified:
        """The next step's events, or what was found out about the model."""
        while True:
            message = await self._next()
            if isinstance(message, Events | Identified):
                return message

    async def _next(self) -> FromEngine:
        assert self._death is not None
        assert self._child is not None
        try:
            # The second wait is for what has come while this process itself stood still.
            for seconds in (self._heartbeat_timeout, SECOND_LOOK):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        return self._decoder.decode(await self._read())
        except (asyncio.IncompleteReadError, OSError):
            code = await asyncio.shield(self._death)
            raise errors.EngineDied(f"the engine process ended {_manner(code)}") from None
        self._child.kill()
        raise errors.EngineDied(f"the engine process gave no sign of life for {self._heartbeat_timeout:g} s")

    async def _read(self) -> bytes:
        """A message's bytes. Where this is cancelled, nothing of them is lost."""
        assert self._reader is not None
        if self._length is None:
            self._length = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "little")
        body = await self._reader.readexactly(self._length)
        self._length = None
        return body

    async def close(self) -> None:
        """Ask the process to end, and kill it if it does not."""
        if self._child is not None and self._death is not None:
            self.send(Stop())
            if not self._start.config.profile:  # which is printed at its end
                self._child.hang_up()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._death), STOP_GRACE)
            if not self._death.done():
                self._child.kill()
                await self._death
            self._child.hang_up()
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()
            self._writer = None


def _wake(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(event.set)


def _manner(code: int) -> str:
    if code >= 0:
        return f"with exit status {code}"
    with contextlib.suppress(ValueError):
        return f"by {signal.Signals(-code).name}"
    return f"by signal {-code}"


class LocalLink:
    """An engine in the caller's thread: the event loop stands still while a step runs."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self._engine: Engine | None = None
        self._wake = asyncio.Event()

    @property
    def pid(self) -> None:
        """It has no process of its own."""
        return None

    async def open(self, opening: Opening) -> EngineInfo:
        """Load the model."""
        from pelton.engine.engine import load_prepared
        from pelton.engine.prepare import Prepared

        prepared = Prepared(self._start)
        plan = prepared.plan(await opening.admit(prepared.needs))
        opening.settle(plan.total, None)
        self._engine = load_prepared(prepared, plan, opening.progress)
        loop = asyncio.get_running_loop()
        self._engine.start_background(lambda: _wake(loop, self._wake))
        return self._engine.info

    def send(self, message: ToEngine) -> None:
        """Hand over a message."""
        if self._engine is None:
            return
        match message:
            case EngineRequest():
                self._engine.submit(message)
            case Vocabulary():
                self._engine.learn(message)
            case Abort(request_id=request_id, choice=choice):
                self._engine.abort(request_id, choice)
            case Unpin(request_id=request_id):
                self._engine.unpin(request_id)
        self._wake.set()

    async def receive(self) -> Events | Identified:
        """Run one step as soon as there is something to do."""
        idle = math.inf if self._engine is None else self._engine.seconds_idle
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if idle == math.inf else idle):
                await self._wake.wait()
        await asyncio.sleep(0)  # readers of the last step's events come first
        if self._engine is None:
            raise errors.EngineDied("the engine was closed")
        if identified := self._engine.take_identified():
            return identified
        events = self._engine.advance()
        if not self._engine.has_work:
            self._wake.clear()
        return self._engine.message(events)

    async def close(self) -> None:
        """Give the engine's memory back."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None
