"""Runs batches: one server of all that share a store does, at the lowest priority there is."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any

import filelock
import msgspec

from pelton.config import ServerConfig
from pelton.errors import EngineDied, PeltonError
from pelton.server.batch_job import BatchJob, Means, Outcome
from pelton.server.batch_store import BatchStore, Job
from pelton.server.batch_types import InputLine
from pelton.server.context import Context, enter
from pelton.server.inside import Inside, Reply
from pelton.server.keys import KeyRing
from pelton.server.limits import Limits
from pelton.server.models import Models
from pelton.server.openai_reply_types import ErrorAnswer
from pelton.server.store import Store

log = logging.getLogger("pelton.server")

LOOK_SECONDS = 2.0
"""How often it is looked for what other servers of the store were told, and for what has expired."""
SWEEP_SECONDS = 3600.0
BROKEN_SECONDS = 30.0
"""After which a batch is taken up again that could not go on: the disk was full, for one."""
WAITS = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0)
"""Seconds before a request is tried again that was not refused for what it is; the last one, from then on."""
MAX_DEATHS = 3
"""Engines that a request may end."""


class BatchRunner:
    """The work on all batches of a store."""

    def __init__(
        self,
        store: Store,
        batches: BatchStore,
        *,
        inside: Inside,
        keys: KeyRing,
        models: Models,
        config: ServerConfig,
        is_draining: Callable[[], bool],
        count: Callable[[bool], None],
    ) -> None:
        """`count` hears of each request that is done, and whether it has failed."""
        self._store = store
        self._batches = batches
        self._inside = inside
        self._keys = keys
        self._models = models
        self._is_draining = is_draining
        self._is_strict = config.strict_params
        self._means = Means(
            batches=batches,
            files=batches.files,
            max_lines=config.max_batch_lines,
            max_line=config.max_body,
            find_model=self._find_model,
            turn=self._turn,
            enter=self._enter,
            ask=self._ask,
            count=count,
        )
        self._jobs: dict[str, tuple[BatchJob, asyncio.Task[None]]] = {}
        self._turns: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._rooms: dict[str, Room] = {}
        self._woken = asyncio.Event()
        self._swept_at = -SWEEP_SECONDS

    def wake(self) -> None:
        """There is something new in the store."""
        self._woken.set()

    async def run(self) -> None:
        """Run batches until this is cancelled; what is not done then is done after the next start."""
        lock = filelock.FileLock(self._store.path.with_suffix(".batches.lock"), thread_local=False)
        try:
            while True:
                self._woken.clear()
                if not self._is_draining() and _is_mine(lock):
                    try:
                        await self._look()
                    except Exception as error:  # whatever it is: others may go on once it has passed
                        is_known = isinstance(error, (PeltonError, OSError))
                        log.error("batches cannot be looked after now: %s", error, exc_info=not is_known)
                try:
                    async with asyncio.timeout(LOOK_SECONDS):
                        await self._woken.wait()
                except TimeoutError:
                    pass
        finally:
            tasks = [task for _, task in self._jobs.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            lock.release()

    async def _look(self) -> None:
        """Take up what is to be done, and end what is to end."""
        now = time.monotonic()
        if now - self._swept_at >= SWEEP_SECONDS:
            self._swept_at = now
            await self._batches.files.sweep()
        for job in self._batches.open():
            if job.batch.id not in self._jobs:
                self._take_up(job)
            work, _ = self._jobs[job.batch.id]
            if job.batch.status == "cancelling":
                work.stop(Outcome("cancelled"))
            elif job.batch.expires_at <= time.time() and job.batch.status != "finalizing":
                work.stop(Outcome("expired"))

    def _take_up(self, job: Job) -> None:
        work = BatchJob(job, self._means)
        task = asyncio.create_task(self._run(work, job.batch.id), name=f"batch {job.batch.id}")
        self._jobs[job.batch.id] = work, task

    async def _run(self, work: BatchJob, id: str) -> None:
        try:
            await work.run()
        except Exception as error:
            log.error("the batch %s cannot go on, and is tried again later", id, exc_info=error)
            await asyncio.sleep(BROKEN_SECONDS)
        finally:
            del self._jobs[id]

    # what jobs need

    def _turn(self, job: Job) -> AbstractAsyncContextManager[object]:
        return self._turns[job.owner]

    async def _find_model(self, job: Job, model: str) -> None:
        enter(self._context(job, job.batch.id))
        await self._models.model(model)

    def _context(self, job: Job, id: str) -> Context:
        """That of a request of the batch. Raises `Unauthorized`."""
        key = self._keys.of(job.owner)
        return Context(
            id=id,
            key=key,
            limits=Limits(self._store, key, account="batch "),
            is_strict=self._is_strict,
            is_idle_priority=True,
        )

    async def _enter(self, model: str) -> Callable[[object], None]:
        if model not in self._rooms:
            self._rooms[model] = Room(lambda: self._models.max_sequences(model))
        room = self._rooms[model]
        await room.enter()
        await self._unless_draining()
        return room.leave

    async def _unless_draining(self) -> None:
        if self._is_draining():
            await asyncio.get_running_loop().create_future()

    async def _ask(self, job: Job, given: InputLine, model: str, id: str) -> Reply:
        num_deaths = num_tries = 0
        while True:
            answer = self._inside.post(given.url, bytes(given.body), self._context(job, id))
            reply = await self._unless_needed(answer, model)
            await self._unless_draining()
            if reply is not None:
                if reply.status not in (429, 503):
                    return reply
                num_deaths += _code(reply) == EngineDied.code
                if num_deaths == MAX_DEATHS:
                    return reply
            await asyncio.sleep(WAITS[min(num_tries, len(WAITS) - 1)])
            num_tries += 1

    async def _unless_needed(self, answer: Coroutine[Any, Any, Reply], model: str) -> Reply | None:
        """The answer, given up where others need the memory of its model."""
        asking = asyncio.create_task(answer)
        leaving = asyncio.create_task(self._models.until_leaving(model))
        try:
            await asyncio.wait({asking, leaving}, return_when=asyncio.FIRST_COMPLETED)
            return asking.result() if asking.done() else None
        finally:
            asking.cancel()
            leaving.cancel()
            await asyncio.gather(asking, leaving, return_exceptions=True)


class Room:
    """As many of one model's requests at once as fill its engine's batch; one until the model is loaded, which that one
    sees to."""

    def __init__(self, limit: Callable[[], int]) -> None:
        """`limit`: how many that are, as far as that is known."""
        self._limit = limit
        self._size = 0
        self._places = asyncio.Semaphore(0)
        self._grow()

    def _grow(self) -> None:
        for _ in range(max(1, self._limit()) - self._size):
            self._places.release()
            self._size += 1

    async def enter(self) -> None:
        """Wait for a place, first come, first served."""
        await self._places.acquire()

    def leave(self, _: object) -> None:
        """Give it to the next one."""
        self._places.release()
        self._grow()


def _is_mine(lock: filelock.BaseFileLock) -> bool:
    """Is it this server that runs the batches?"""
    if not lock.is_locked:
        try:
            lock.acquire(blocking=False)
        except (filelock.Timeout, OSError):
            return False
    return True


def _code(reply: Reply) -> str | None:
    return msgspec.json.decode(reply.body, type=ErrorAnswer).error.code
