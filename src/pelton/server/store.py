"""The server's SQLite file: keys, what they have used, and all else that outlives the process. The home of sqlite3.

Several processes may have it open at once (WAL). What is read while a request waits is read in the event loop's thread,
a few microseconds from the page cache; what is written is written in a thread of the store's own, one piece of work
after the other.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from pelton.errors import ConfigError, Unavailable

log = logging.getLogger("pelton.server")
T = TypeVar("T")

CLOSED = "the server is shutting down: nothing is kept any more"
BUSY_SECONDS = 5.0
"""How long another process's writing is waited for."""

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        "CREATE TABLE settings (name TEXT PRIMARY KEY, value BLOB NOT NULL) STRICT, WITHOUT ROWID",
        "CREATE TABLE keys (id TEXT PRIMARY KEY, name TEXT NOT NULL, hash BLOB NOT NULL, scopes TEXT NOT NULL,"
        " models TEXT, rpm INTEGER, tpm INTEGER, created_at REAL NOT NULL, expires_at REAL, revoked_at REAL) STRICT",
        "CREATE UNIQUE INDEX keys_by_name ON keys (name) WHERE revoked_at IS NULL",
        "CREATE TABLE buckets (key_id TEXT NOT NULL, kind TEXT NOT NULL, level REAL NOT NULL, at REAL NOT NULL,"
        " PRIMARY KEY (key_id, kind)) STRICT, WITHOUT ROWID",
        "CREATE TABLE usage (key_id TEXT NOT NULL, day TEXT NOT NULL, model TEXT NOT NULL, requests INTEGER NOT NULL,"
        " failed INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL,"
        " completion_tokens INTEGER NOT NULL, PRIMARY KEY (key_id, day, model)) STRICT, WITHOUT ROWID",
    ),
    (
        "CREATE TABLE responses (id TEXT PRIMARY KEY, key_id TEXT NOT NULL, previous_id TEXT, runner TEXT,"
        " created_at REAL NOT NULL, used_at REAL NOT NULL, input BLOB NOT NULL, response BLOB NOT NULL,"
        " num_bytes INTEGER NOT NULL) STRICT",
        "CREATE INDEX responses_by_use ON responses (used_at, num_bytes)",
    ),
    (
        "CREATE TABLE files (number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL,"
        " purpose TEXT NOT NULL, filename TEXT NOT NULL, bytes INTEGER NOT NULL, created_at INTEGER NOT NULL,"
        " expires_at INTEGER) STRICT",
        "CREATE INDEX files_by_owner ON files (owner)",
        "CREATE TABLE batches (number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL,"
        " status TEXT NOT NULL, is_open INTEGER NOT NULL, input_file_id TEXT NOT NULL, output_id TEXT NOT NULL,"
        " error_id TEXT NOT NULL, output_seconds INTEGER, document BLOB NOT NULL) STRICT",
        "CREATE INDEX batches_by_owner ON batches (owner)",
        "CREATE INDEX open_batches ON batches (input_file_id) WHERE is_open",
    ),
)
"""Statements that bring a file from version i to i + 1. Those that were released are never changed."""


class Store:
    """An open file. `read` belongs to one thread, the event loop's; `write` may be called from any. Both raise
    `Unavailable` where the file cannot be used any more: the disk is full, or it was damaged."""

    def __init__(self, path: Path) -> None:
        """Open the file, made where there is none. Raises `ConfigError` where it cannot be."""
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
            path.chmod(0o600)  # also one that has been copied here: it holds what hashes keys
            self._writer = self._connect()
            if not self._is_current():  # what needs no change is read where nothing can be written, too
                self._transact(self._migrate)
            self._reader = self._connect()
            self._reader.execute("PRAGMA query_only = on")
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"the server's store {path} cannot be used: {error}", param="store") from None
        self._is_closed = False
        self._trouble = ""
        """Why it could not be used the last time; "": it could."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pelton store")

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA journal_mode = wal")
        connection.execute("PRAGMA synchronous = normal")
        connection.execute("PRAGMA secure_delete = on")
        return connection

    def _is_current(self) -> bool:
        (version,) = self._writer.execute("PRAGMA user_version").fetchone()
        return bool(version == len(MIGRATIONS))

    def _migrate(self, connection: sqlite3.Connection) -> None:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version > len(MIGRATIONS):
            raise sqlite3.DatabaseError(
                f"it is of a newer Pelton (version {version}, this one knows {len(MIGRATIONS)})"
            )
        for statements in MIGRATIONS[version:]:
            for statement in statements:
                connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")

    def read(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """All rows that a SELECT gives."""
        if self._is_closed:
            raise Unavailable(CLOSED)
        with self._usable():
            return self._reader.execute(statement, values).fetchall()

    def write(self, work: Callable[[sqlite3.Connection], T]) -> Future[T]:
        """Do `work` as one transaction in the store's thread, after what was handed over before. An exception in it
        undoes it. Never raises: what comes after `close` fails, and is logged."""

        def run() -> T:
            with self._usable():
                result = self._transact(work)
            if self._trouble:
                self._trouble = ""
                log.warning("the server's store %s can be written again", self.path)
            return result

        return self._submit(run)

    def _submit(self, run: Callable[[], T]) -> Future[T]:
        try:
            return self._thread.submit(run)
        except RuntimeError:  # it is closed
            log.warning("something came to be written to the server's store %s after its end, and was not", self.path)
            failed: Future[T] = Future()
            failed.set_exception(Unavailable(CLOSED))
            return failed

    async def written(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """`write`, awaited."""
        return await asyncio.wrap_future(self.write(work))

    async def erased(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """`written`, for work that deletes: what it has deleted is then no more in the file, nor in the log beside it,
        unless another process reads there just now."""
        result = await self.written(work)

        def checkpoint() -> None:
            with self._usable():
                self._writer.execute("PRAGMA wal_checkpoint(truncate)")

        await asyncio.wrap_future(self._submit(checkpoint))
        return result

    @contextmanager
    def _usable(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            if str(error) != self._trouble:  # once, and not for each request
                self._trouble = str(error)
                log.error("the server's store %s cannot be used: %s", self.path, error)
            raise Unavailable(f"the server's store cannot be used: {error}") from error

    def _transact(self, work: Callable[[sqlite3.Connection], T]) -> T:
        connection = self._writer
        connection.execute("BEGIN IMMEDIATE")
        try:
            result = work(connection)
            connection.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
            raise
        return result

    def secret(self, name: str) -> bytes:
        """32 random bytes, the same ones for this name in every process that opens the file."""

        if found := self.read("SELECT value FROM settings WHERE name = ?", (name,)):
            return bytes(found[0][0])

        def make(connection: sqlite3.Connection) -> bytes:
            connection.execute("INSERT OR IGNORE INTO settings VALUES (?, ?)", (name, secrets.token_bytes(32)))
            (value,) = connection.execute("SELECT value FROM settings WHERE name = ?", (name,)).fetchone()
            return bytes(value)

        return self.write(make).result()

    def close(self) -> None:
        """Finish what is to be written, and close. May be called twice."""
        self._thread.shutdown(wait=True)
        self._is_closed = True
        self._reader.close()
        self._writer.close()


Connection = sqlite3.Connection
"""What pieces of work get."""
