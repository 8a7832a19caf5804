"""Batches as the store has them: what clients are told of each, and who it belongs to."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from pelton.errors import Conflict, NotFound, RequestTooLarge
from pelton.server.batch_types import WINDOW_SECONDS, Batch, BatchRequest, Status
from pelton.server.file_store import FileStore, insert
from pelton.server.file_types import FileObject
from pelton.server.store import Connection, Store

MAX_OPEN, MAX_KEPT = 100, 10_000
"""Batches of a key that are not over, and those that are known at all: the oldest that are over are forgotten."""
OPEN: tuple[Status, ...] = ("validating", "in_progress", "finalizing", "cancelling")
_COLUMNS = "document, owner, output_id, error_id, output_seconds"


@dataclass(frozen=True)
class Job:
    """A batch that is not over, with what only the server needs of it."""

    batch: Batch
    owner: str
    output_id: str
    error_id: str
    """The files that answers go to. Nobody is told of them before it is over."""
    output_seconds: int | None
    """After which those end."""


class BatchStore:
    """The batches of a store. An `owner` is as `FileStore` has it."""

    def __init__(self, store: Store, files: FileStore) -> None:
        self._store = store
        self.files = files

    async def create(self, asked: BatchRequest, owner: str) -> Batch:
        """A new batch, to be validated. Raises `NotFound` for its input, or `RequestTooLarge` where there are too
        many of them, or of their owner's files."""
        self.files.room(owner)  # for what it will write
        now = int(time.time())
        batch = Batch(
            id=f"batch_{secrets.token_hex(12)}",
            endpoint=asked.endpoint,
            input_file_id=asked.input_file_id,
            completion_window=asked.completion_window,
            created_at=now,
            expires_at=now + WINDOW_SECONDS,
            metadata=asked.metadata,
        )
        seconds = None if asked.output_expires_after is None else asked.output_expires_after.seconds
        made = (self.files.new_id(), self.files.new_id())

        def add(connection: Connection) -> None:
            ((count,),) = connection.execute("SELECT count(*) FROM batches WHERE owner = ? AND is_open", (owner,))
            if count >= MAX_OPEN:
                raise RequestTooLarge(f"{count} batches are not over yet, which is as many as a key may have")
            self.files.find_in(connection, asked.input_file_id, owner, "batch")
            row = (batch.id, owner, batch.status, batch.input_file_id, *made, seconds, msgspec.json.encode(batch))
            connection.execute(
                "INSERT INTO batches (id, owner, status, is_open, input_file_id, output_id, error_id, output_seconds,"
                " document) VALUES (?, ?, ?, 1, ?, ?, ?, ?, ?)",
                row,
            )
            connection.execute(
                "DELETE FROM batches WHERE owner = ?1 AND NOT is_open AND number <="
                " (SELECT number FROM batches WHERE owner = ?1 ORDER BY number DESC LIMIT 1 OFFSET ?2)",
                (owner, MAX_KEPT),
            )

        await self._store.written(add)
        return batch

    def find(self, id: str, owner: str = "") -> Batch:
        """Raises `NotFound`."""
        rows = self._store.read("SELECT document FROM batches WHERE id = ? AND ? IN ('', owner)", (id, owner))
        if not rows:
            raise NotFound(f"there is no batch {id[:100]!r}", param="batch_id")
        return _batch(rows[0][0])

    def some(self, owner: str, *, limit: int, after: str | None) -> list[Batch]:
        """Up to `limit` of them, the newest first, those behind `after`. Raises `NotFound` for that one."""
        values: list[object] = [owner]
        behind = ""
        if after is not None:
            self.find(after, owner)
            behind = " AND number < (SELECT number FROM batches WHERE id = ?)"
            values.append(after)
        rows = self._store.read(
            f"SELECT document FROM batches WHERE ? IN ('', owner){behind} ORDER BY number DESC LIMIT ?",
            (*values, limit),
        )
        return [_batch(document) for (document,) in rows]

    def open(self) -> list[Job]:
        """All that are not over, the oldest first."""
        rows = self._store.read(f"SELECT {_COLUMNS} FROM batches WHERE is_open ORDER BY number")
        return [Job(_batch(document), *rest) for document, *rest in rows]

    def counts(self) -> dict[str, int]:
        """How many there are, by status."""
        return dict(self._store.read("SELECT status, count(*) FROM batches GROUP BY status"))

    async def change(self, id: str, change: Callable[[Batch], Batch], files: tuple[FileObject, ...] = ()) -> Batch:
        """Make a batch what `change` makes of it, and let files be there from then on, both or neither. `change` may
        raise."""

        def update(connection: Connection) -> Batch:
            document, owner = connection.execute("SELECT document, owner FROM batches WHERE id = ?", (id,)).fetchone()
            batch = change(_batch(document))
            connection.execute(
                "UPDATE batches SET status = ?, is_open = ?, document = ? WHERE id = ?",
                (batch.status, batch.status in OPEN, msgspec.json.encode(batch), id),
            )
            for file in files:
                insert(connection, owner, file)
            return batch

        return await self._store.written(update)

    async def cancel(self, id: str, owner: str) -> Batch:
        """Have a batch end; what it has done so far is kept. Raises `NotFound`, or `Conflict` where it is over."""
        self.find(id, owner)

        def cancel(batch: Batch) -> Batch:
            if batch.status == "cancelling":
                return batch
            if batch.status not in ("validating", "in_progress"):
                raise Conflict(f"the batch {batch.id} cannot be cancelled: it is {batch.status}", param="batch_id")
            return moved(batch, "cancelling")

        return await self.change(id, cancel)


def moved(batch: Batch, status: Status, **changes: object) -> Batch:
    """The batch, now in another status, with the time of that."""
    return msgspec.structs.replace(batch, status=status, **{f"{status}_at": int(time.time())}, **changes)


def _batch(document: bytes) -> Batch:
    return msgspec.json.decode(document, type=Batch)
