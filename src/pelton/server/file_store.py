"""Files that clients keep here: their contents on the disk beside the store, in a folder of its own, and what is known
of them in the store.

A file is there once its row is. Its content is written under another name, synced, and renamed before; so what has no
row, and is old, was left behind by a server that died, as was a row without a content by one that lost its disk.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from pelton.config import ServerConfig
from pelton.errors import Conflict, InvalidRequest, NotFound, RequestTooLarge, Unavailable
from pelton.server.file_types import MAX_LIFE, FileObject
from pelton.server.store import Connection, Store

T = TypeVar("T")
Ask = Callable[[str, tuple[str]], Iterable[tuple[Any, ...]]]
"""The rows that a SELECT gives, with these values."""
log = logging.getLogger("pelton.server")

STALE_SECONDS = 3600.0
"""What has no row and was not written to for so long is nobody's: another server may be about to finish the others."""
_TEMPORARY = ".part"
_COLUMNS = "id, purpose, filename, bytes, created_at, expires_at"


class FileStore:
    """The files of a store. An `owner` is the id of a key; "", who needs none, has all of them."""

    def __init__(self, store: Store, config: ServerConfig) -> None:
        self._store = store
        self._max_file = int(config.max_file)
        self._max_files = config.max_files
        self._max_total = int(config.max_files_size)
        self.num_coming: Counter[str] = Counter()
        """Bytes of each owner's uploads."""
        self.folder = store.path.with_suffix(".files")

    def path(self, id: str) -> Path:
        """Where a file's content is. `id` is one that was made here."""
        return self.folder / id

    def new_id(self) -> str:
        """An id for a file to come."""
        return f"file-{secrets.token_hex(12)}"

    def find(self, id: str, owner: str) -> FileObject:
        """Raises `NotFound`."""
        rows = self._store.read(
            f"SELECT {_COLUMNS} FROM files WHERE id = ? AND ? IN ('', owner) AND coalesce(expires_at, 1e18) > ?",
            (id, owner, time.time()),
        )
        if not rows:
            raise no_file(id)
        return _file(rows[0])

    def find_in(self, connection: Connection, id: str, owner: str, purpose: str) -> None:
        """Within a piece of work for the store: raises `NotFound`, or `InvalidRequest` for another purpose."""
        row = connection.execute(
            "SELECT purpose FROM files WHERE id = ? AND ? IN ('', owner) AND coalesce(expires_at, 1e18) > ?",
            (id, owner, time.time()),
        ).fetchone()
        if row is None:
            raise no_file(id)
        if row[0] != purpose:
            raise InvalidRequest(f"the file {id} is one for {row[0]}, and must be one for {purpose}", param="purpose")

    def some(
        self,
        owner: str,
        purpose: str | None = None,
        *,
        limit: int,
        is_newest_first: bool = True,
        after: str | None = None,
    ) -> list[FileObject]:
        """Up to `limit` of them, those behind the file `after`. Raises `NotFound` for that one."""
        sign, order = ("<", "DESC") if is_newest_first else (">", "ASC")
        values: list[object] = [owner, time.time()]
        conditions = "? IN ('', owner) AND coalesce(expires_at, 1e18) > ?"
        if purpose is not None:
            conditions += " AND purpose = ?"
            values.append(purpose)
        if after is not None:
            self.find(after, owner)
            conditions += f" AND number {sign} (SELECT number FROM files WHERE id = ?)"
            values.append(after)
        statement = f"SELECT {_COLUMNS} FROM files WHERE {conditions} ORDER BY number {order} LIMIT ?"
        return [_file(row) for row in self._store.read(statement, (*values, limit))]

    def room(self, owner: str, num_come: int = 0) -> int:
        """Bytes that may still come of an owner's next file, of which there are `num_come`. Raises `RequestTooLarge`
        where there may be no further one."""
        self._check_count(self._store.read, owner)
        return min(self._max_file - num_come, self.bytes_left(owner))

    def bytes_left(self, owner: str) -> int:
        """Bytes that may still come of all that an owner sends, and what its batches write. Raises `RequestTooLarge`
        where it is none."""
        total = self._total(self._store.read, owner) + self.num_coming[owner]
        if total >= self._max_total:
            raise self._too_large(total)
        return self._max_total - total

    def _check_count(self, ask: Ask, owner: str) -> None:
        ((count,),) = ask("SELECT count(*) FROM files WHERE owner = ?", (owner,))
        if count >= self._max_files:
            raise RequestTooLarge(f"there are {count} files, and there may be {self._max_files}: delete some")

    def _total(self, ask: Ask, owner: str) -> int:
        """Bytes of an owner's files, and of those that batches under way write for it."""
        ((total,),) = ask("SELECT coalesce(sum(bytes), 0) FROM files WHERE owner = ?", (owner,))
        written = ask("SELECT output_id, error_id FROM batches WHERE is_open AND owner = ?", (owner,))
        return int(total) + sum(_size(self.path(id)) for ids in written for id in ids)

    def _too_large(self, total: int) -> RequestTooLarge:
        return RequestTooLarge(f"the files have {total} bytes, and may have {self._max_total}: delete some")

    @asynccontextmanager
    async def upload(self, owner: str) -> AsyncIterator[Upload]:
        """A file that is being sent; gone again unless it is kept."""
        self.room(owner)
        new = await asyncio.to_thread(on_disk, Upload, self, owner)
        try:
            yield new
        finally:
            self.num_coming[owner] -= new.num_bytes
            await asyncio.to_thread(new.close)

    async def insert(self, owner: str, file: FileObject) -> None:
        """A file whose content is in its place is there from now on. Raises `RequestTooLarge` where others were there
        first."""

        def add(connection: Connection) -> None:
            self._check_count(connection.execute, owner)
            if (total := self._total(connection.execute, owner) + file.bytes) > self._max_total:
                raise self._too_large(total)
            insert(connection, owner, file)

        await self._store.written(add)

    async def delete(self, id: str, owner: str) -> None:
        """Raises `NotFound`, or `Conflict` for the input of a batch that is not over."""
        self.find(id, owner)

        def remove(connection: Connection) -> None:
            using = connection.execute("SELECT id FROM batches WHERE input_file_id = ? AND is_open", (id,)).fetchone()
            if using is not None:
                raise Conflict(f"the file {id} is the input of {using[0]}, which is not over", param="file_id")
            connection.execute("DELETE FROM files WHERE id = ?", (id,))

        await self._store.written(remove)
        await asyncio.to_thread(self.path(id).unlink, missing_ok=True)

    async def sweep(self) -> None:
        """Remove files that have expired, rows without a content, and contents without a row."""

        def expired(connection: Connection) -> set[str]:
            connection.execute(
                "DELETE FROM files WHERE expires_at <= ?"
                " AND id NOT IN (SELECT input_file_id FROM batches WHERE is_open)",
                (time.time(),),
            )
            rows = connection.execute("SELECT id FROM files").fetchall()
            gone = [row for row in rows if not self.path(row[0]).is_file()]
            connection.executemany("DELETE FROM files WHERE id = ?", gone)
            made = connection.execute("SELECT output_id, error_id FROM batches WHERE is_open").fetchall()
            return {id for (id,) in rows} | {id for ids in made for id in ids}

        if self.folder.is_dir():
            known = await self._store.written(expired)
            await asyncio.to_thread(self._remove_unknown, known)

    def _remove_unknown(self, known: set[str]) -> None:
        oldest = time.time() - STALE_SECONDS
        for path in self.folder.iterdir():
            with suppress(FileNotFoundError):  # its upload has ended
                if path.name.startswith("file-") and path.name not in known and path.stat().st_mtime < oldest:
                    path.unlink()


class Upload:
    """A file that is being sent."""

    def __init__(self, files: FileStore, owner: str) -> None:
        self._files, self._owner = files, owner
        self._id = files.new_id()
        self.num_bytes = 0
        files.folder.mkdir(mode=0o700, exist_ok=True)
        self._part = files.path(self._id + _TEMPORARY)
        self._file: BinaryIO = open_private(self._part)

    async def take(self, data: bytes) -> None:
        """The file's next bytes. Raises `RequestTooLarge`."""
        if len(data) > (room := self._files.room(self._owner, self.num_bytes)):
            message = f"the file is larger than the {self.num_bytes + room} bytes that it may have"
            raise RequestTooLarge(message, param="file")
        self.num_bytes += len(data)
        self._files.num_coming[self._owner] += len(data)
        await asyncio.to_thread(on_disk, self._file.write, data)

    async def keep(self, filename: str, purpose: str, seconds: int | None) -> FileObject:
        """All has come: the file is there. `seconds`: after which it ends; None: never, but for inputs of batches."""
        now = int(time.time())
        life = MAX_LIFE if seconds is None and purpose == "batch" else seconds
        file = FileObject(
            id=self._id,
            bytes=self.num_bytes,
            created_at=now,
            filename=filename,
            purpose=purpose,
            expires_at=None if life is None else now + life,
        )
        await asyncio.to_thread(on_disk, self._settle)
        try:
            await self._files.insert(self._owner, file)
        except BaseException:
            self._files.path(self._id).unlink(missing_ok=True)
            raise
        return file

    def _settle(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._part.rename(self._files.path(self._id))
        sync_folder(self._files.folder)

    def close(self) -> None:
        """Leave nothing behind of what was not kept."""
        self._file.close()
        self._part.unlink(missing_ok=True)


def insert(connection: Connection, owner: str, file: FileObject) -> None:
    """Add a file's row."""
    row = (owner, file.id, file.purpose, file.filename, file.bytes, file.created_at, file.expires_at)
    connection.execute(
        "INSERT INTO files (owner, id, purpose, filename, bytes, created_at, expires_at) VALUES (?, ?, ?, ?, ?, ?, ?)",
        row,
    )


def no_file(id: str) -> NotFound:
    """What is said of a file that is not there, or is another's."""
    return NotFound(f"there is no file {id[:100]!r}", param="file_id")


def on_disk(work: Callable[..., T], *values: object) -> T:
    """The result of `work`. Raises `Unavailable` where the disk is full, or cannot be written."""
    try:
        return work(*values)
    except OSError as error:
        log.error("a file cannot be kept: %s", error)
        raise Unavailable(f"the file cannot be kept: {error.strerror}") from error


def open_private(path: Path) -> BinaryIO:
    """A new file that only this user may read, open to be written."""
    return os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600), "wb")


def sync_folder(folder: Path) -> None:
    """Have the names in it on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _file(row: tuple[object, ...]) -> FileObject:
    return FileObject(**dict(zip(_COLUMNS.split(", "), row, strict=True)))  # type: ignore[arg-type]
