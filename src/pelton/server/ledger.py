"""What each key has used, by day and model, in the store. Counts are gathered in memory and written once a second."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from contextvars import Context

import msgspec

from pelton.request import Usage
from pelton.server.store import Connection, Store

log = logging.getLogger("pelton.server")

FLUSH_SECONDS = 1.0
RETRY_SECONDS = 5.0
"""After a write that failed."""
MAX_ENTRIES = 10_000
"""That are kept in memory; beyond that a key's models of a day are one."""
OTHERS = "(others)"
MAX_TOLD = 100
Entry = tuple[str, str, str]
"""A key's id, a day, a model."""


class Used(msgspec.Struct, frozen=True, kw_only=True):
    """What one key used of one model on one day (UTC)."""

    key_id: str
    day: str
    model: str
    requests: int
    failed: int
    """Of those, the ones that did not end well."""
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class Ledger:
    """Counts usage. `add` belongs to one event loop. What the store cannot take now is kept, and handed over again."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._counts: dict[Entry, list[int]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_failing = False

    def add(self, key_id: str, model: str, usage: Usage, *, is_failed: bool) -> None:
        """One request has ended."""
        day = time.strftime("%Y-%m-%d", time.gmtime())
        used = (1, int(is_failed), usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        with self._lock:
            self._count((key_id, day, model), used)
        self._loop = asyncio.get_running_loop()
        self._plan()

    def _count(self, entry: Entry, used: Sequence[int]) -> None:
        if entry not in self._counts and len(self._counts) >= MAX_ENTRIES:
            entry = (entry[0], entry[1], OTHERS)
        before = self._counts.get(entry, (0,) * len(used))
        self._counts[entry] = [count + more for count, more in zip(before, used, strict=True)]

    def _plan(self) -> None:
        """Write soon."""
        if self._timer is None and self._loop is not None:
            seconds = RETRY_SECONDS if self._is_failing else FLUSH_SECONDS
            self._timer = self._loop.call_later(seconds, self.flush, context=Context())

    def flush(self) -> None:
        """Hand what was counted to the store."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        with self._lock:
            counts, self._counts = self._counts, {}
        if not counts:
            return
        rows: list[tuple[str | int, ...]] = [(*entry, *used) for entry, used in counts.items()]
        writing = self._store.write(lambda connection: _insert(connection, rows))
        writing.add_done_callback(lambda done: self._on_written(done, counts))

    def _on_written(self, done: Future[None], counts: dict[Entry, list[int]]) -> None:
        """In the store's thread."""
        if (error := done.exception()) is None:
            self._is_failing = False
            return
        if not self._is_failing:
            log.error("what keys have used cannot be written, and is kept until it can be: %s", error)
        self._is_failing = True
        with self._lock:
            for entry, used in counts.items():
                self._count(entry, used)
        if self._loop is not None:
            with suppress(RuntimeError):  # it is closed: `close` has the last word
                self._loop.call_soon_threadsafe(self._plan)

    def close(self) -> None:
        """Write what there is, and log what of it cannot be written."""
        self._store.write(lambda connection: None).exception()  # what is on its way has been written, or is back
        self.flush()
        self._store.write(lambda connection: None).exception()
        with self._lock:
            counts, self._counts = self._counts, {}
        if counts:
            told = [f"{entry}: {used}" for entry, used in list(counts.items())[:MAX_TOLD]]
            log.error("not written of what keys have used: %d entries, %s", len(counts), "; ".join(told))


def _insert(connection: Connection, rows: list[tuple[str | int, ...]]) -> None:
    connection.executemany(
        "INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET requests = requests + excluded."
        "requests, failed = failed + excluded.failed, prompt_tokens = prompt_tokens + excluded.prompt_tokens,"
        " cached_tokens = cached_tokens + excluded.cached_tokens,"
        " completion_tokens = completion_tokens + excluded.completion_tokens",
        rows,
    )


def used(store: Store, since: str = "") -> list[Used]:
    """What was used, by day, key and model. `since`: the first day, as 2026-01-31."""
    rows = store.read(
        "SELECT key_id, day, model, requests, failed, prompt_tokens, cached_tokens, completion_tokens FROM usage"
        " WHERE day >= ? ORDER BY day, key_id, model",
        (since,),
    )
    names = Used.__struct_fields__
    return [Used(**dict(zip(names, row, strict=True))) for row in rows]
