"""One batch, from where it stands to its end."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field

import msgspec

from pelton.errors import InvalidRequest, ModelNotFound, PeltonError, RequestTooLarge, Unauthorized, Unavailable
from pelton.server import batch_input
from pelton.server.batch_log import BatchLog, is_failure
from pelton.server.batch_store import BatchStore, Job, moved
from pelton.server.batch_types import (
    Batch,
    Counts,
    Failure,
    InputLine,
    LineBody,
    LineError,
    LineErrors,
    LineResponse,
    OutputLine,
    Status,
)
from pelton.server.file_store import FileStore
from pelton.server.file_types import MAX_LIFE, FileObject
from pelton.server.inside import Reply
from pelton.server.openai_reply import error_body

log = logging.getLogger("pelton.server")

EXPIRED = Failure(
    code="batch_expired",
    message="This request could not be executed before the completion window expired.",
)
GONE = LineError(code="file_not_found", message="the input file is gone", param="input_file_id")
MAX_TOGETHER = 1000
"""Lines that are written at once."""


@dataclass(frozen=True)
class Outcome:
    """How a batch has ended."""

    status: Status
    errors: list[LineError] = field(default_factory=list)


@dataclass(frozen=True)
class Means:
    """What all batches share."""

    batches: BatchStore
    files: FileStore
    max_lines: int
    max_line: int
    find_model: Callable[[Job, str], Awaitable[None]]
    """Raises `ModelNotFound` for a model that the batch's owner cannot use, or `Unauthorized`."""
    turn: Callable[[Job], AbstractAsyncContextManager[object]]
    """Waits until it is the batch's turn among those of its owner."""
    enter: Callable[[str], Awaitable[Callable[[object], None]]]
    """Waits for room for a request of the model; what is to be called when that is over."""
    ask: Callable[[Job, InputLine, str, str], Awaitable[Reply]]
    """The answer to a line, for a model, as the request of this id. Raises `Unauthorized` where the owner may ask
    nothing any more."""
    count: Callable[[bool], None]
    """Hears of each line that is done, and whether it has failed."""


class BatchJob:
    """The work on one batch. It may be ended at any point; whoever begins it anew goes on from there."""

    def __init__(self, job: Job, means: Means) -> None:
        self._job = job
        self._means = means
        self._id = job.batch.id
        self._input = means.files.path(job.batch.input_file_id)
        self._log = BatchLog(means.files.path(job.output_id), means.files.path(job.error_id))
        self._stop: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._total = job.batch.request_counts.total
        self._telling: asyncio.Task[object] | None = None
        self._model = ""

    def stop(self, outcome: Outcome) -> None:
        """End it so; what is done is kept."""
        if not self._stop.done():
            self._stop.set_result(outcome)

    async def run(self) -> None:
        """Bring it to its end."""
        try:
            await self._finish(await self._outcome())
        finally:
            await asyncio.to_thread(self._log.end)

    async def _outcome(self) -> Outcome:
        work = asyncio.create_task(self._work())
        try:
            await asyncio.wait({work, self._stop}, return_when=asyncio.FIRST_COMPLETED)
            return self._stop.result() if self._stop.done() else work.result()
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def _work(self) -> Outcome:
        batch = self._job.batch
        if batch.status == "validating":
            if errors := await self._errors():
                return Outcome("failed", errors)
            batch = await self._means.batches.change(self._id, self._begun)
        async with self._means.turn(self._job):
            if not self._input.is_file():
                return Outcome("failed", [GONE])
            await self._log.open()  # only now: those that wait for their turn have no thread
            return await self._run_lines(batch.model or "")

    async def _errors(self) -> list[LineError]:
        """What is wrong with the input."""
        means, endpoint = self._means, self._job.batch.endpoint
        try:
            checked = await asyncio.to_thread(
                batch_input.check, self._input, endpoint, max_lines=means.max_lines, max_line=means.max_line
            )
        except FileNotFoundError:
            return [GONE]
        if checked.errors:
            return checked.errors
        try:
            await means.find_model(self._job, checked.model or "")
        except (ModelNotFound, Unauthorized) as error:
            return [_line_error(error)]
        self._total, self._model = checked.total, checked.model or ""
        return []

    def _begun(self, batch: Batch) -> Batch:
        if batch.status != "validating":  # it was cancelled meanwhile
            return batch
        return moved(batch, "in_progress", model=self._model, request_counts=Counts(total=self._total))

    async def _run_lines(self, model: str) -> Outcome:
        lines = (batch_input.read(line) for _, line in batch_input.lines(self._input))
        async with asyncio.TaskGroup() as group:
            while (given := await asyncio.to_thread(next, lines, None)) is not None:
                if given.custom_id not in self._log.done:
                    leave = await self._means.enter(model)
                    try:
                        self._means.files.bytes_left(self._job.owner)
                    except RequestTooLarge as error:
                        leave(None)
                        return Outcome("failed", [LineError(code="files_too_large", message=error.message)])
                    task = group.create_task(self._run_line(given, model))
                    task.add_done_callback(leave)  # which is called, too, where it never ran
        return Outcome("completed")

    async def _run_line(self, given: InputLine, model: str) -> None:
        try:
            await self._write([await self._answered(given, model)])
        except Unauthorized as error:
            self.stop(Outcome("failed", [_line_error(error)]))

    async def _answered(self, given: InputLine, model: str) -> OutputLine:
        id = _new_id()
        reply = _refused(given) or await self._means.ask(self._job, given, model, id)
        response = LineResponse(status_code=reply.status, request_id=id, body=msgspec.Raw(reply.body))
        return OutputLine(id=id, custom_id=given.custom_id, response=response, error=None)

    async def _write(self, lines: list[OutputLine]) -> None:
        await self._log.add(lines)
        for line in lines:
            self._means.count(is_failure(line))
        if self._telling is None or self._telling.done():
            self._telling = asyncio.create_task(self._tell())

    async def _tell(self) -> None:
        """Let clients know how far it is."""
        with suppress(Unavailable):  # the next line tells it again
            await self._means.batches.change(self._id, self._counted)

    def _counted(self, batch: Batch) -> Batch:
        log = self._log
        counts = Counts(total=self._total, completed=log.num_completed, failed=log.num_failed)
        return msgspec.structs.replace(batch, request_counts=counts, usage=log.usage)

    async def _finish(self, outcome: Outcome) -> None:
        await self._log.open()
        if outcome.status == "completed":
            await self._means.batches.change(self._id, _finalizing)
        elif outcome.status == "expired" and self._total:
            await self._write_off()
        if self._telling is not None:
            await asyncio.gather(self._telling, return_exceptions=True)
        sizes = await self._log.close()
        files = [
            self._file(id, kind, size)
            for id, kind, size in zip(
                (self._job.output_id, self._job.error_id), ("output", "error"), sizes, strict=True
            )
        ]

        def ended(batch: Batch) -> Batch:
            status = "cancelled" if batch.status == "cancelling" else outcome.status
            errors = LineErrors(data=outcome.errors) if outcome.errors else None
            ids = [file.id if file.bytes else None for file in files]
            return moved(self._counted(batch), status, errors=errors, output_file_id=ids[0], error_file_id=ids[1])

        await self._means.batches.change(self._id, ended, tuple(file for file in files if file.bytes))

    async def _write_off(self) -> None:
        """Say of each request that has not run why."""
        for some in await asyncio.to_thread(self._left):
            await self._write(some)

    def _left(self) -> list[list[OutputLine]]:
        if not self._input.is_file():  # of a disk that was lost: nobody knows any more which they were
            return []
        ids = [batch_input.read(line).custom_id for _, line in batch_input.lines(self._input)]
        left = [
            OutputLine(id=_new_id(), custom_id=custom_id, response=None, error=EXPIRED)
            for custom_id in ids
            if custom_id not in self._log.done
        ]
        return [left[start : start + MAX_TOGETHER] for start in range(0, len(left), MAX_TOGETHER)]

    def _file(self, id: str, kind: str, size: int) -> FileObject:
        now = int(time.time())
        return FileObject(
            id=id,
            bytes=size,
            created_at=now,
            filename=f"{self._id}_{kind}.jsonl",
            purpose="batch_output",
            expires_at=now + (self._job.output_seconds or MAX_LIFE),
        )


def _finalizing(batch: Batch) -> Batch:
    return moved(batch, "finalizing") if batch.status == "in_progress" else batch


def _new_id() -> str:
    return f"batch_req_{secrets.token_hex(12)}"


def _refused(given: InputLine) -> Reply | None:
    """What is answered to a request that no batch runs."""
    asked = msgspec.json.decode(given.body, type=LineBody)
    name = "stream" if asked.stream else "background" if asked.background else None
    if name is None:
        return None
    message = f"{name}: true has no meaning in a batch: its answers are read when it is over"
    error = InvalidRequest(message, param=name)
    return Reply(error.status, msgspec.json.encode(error_body(error)))


def _line_error(error: PeltonError) -> LineError:
    return LineError(code=error.code or error.type, message=error.message, param=error.param)
