"""What each key has used, by day and model, in the store. Counts are gathered in memory and written once a second."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from concurrent.futures import Future
from contextvars import Context

import msgspec

from pelton.request import Usage
from pelton.server.store import Connection, Store

log = logging.getLogger("pelton.server")

FLUSH_SECONDS = 1.0


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
    """Counts usage. `add` belongs to one event loop."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._counts: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0, 0, 0, 0])
        self._timer: asyncio.TimerHandle | None = None

    def add(self, key_id: str, model: str, usage: Usage, *, is_failed: bool) -> None:
        """One request has ended."""
        day = time.strftime("%Y-%m-%d", time.gmtime())
        counts = self._counts[key_id, day, model]
        used = (1, int(is_failed), usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        for i, count in enumerate(used):
            counts[i] += count
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_SECONDS, self.flush, context=Context())

    def flush(self) -> None:
        """Hand what was counted to the store."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        rows: list[tuple[str | int, ...]] = [(*key, *counts) for key, counts in self._counts.items()]
        self._counts.clear()
        if rows:
            self._store.write(lambda connection: _insert(connection, rows)).add_done_callback(_tell)


def _insert(connection: Connection, rows: list[tuple[str | int, ...]]) -> None:
    connection.executemany(
        "INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET requests = requests + excluded."
        "requests, failed = failed + excluded.failed, prompt_tokens = prompt_tokens + excluded.prompt_tokens,"
        " cached_tokens = cached_tokens + excluded.cached_tokens,"
        " completion_tokens = completion_tokens + excluded.completion_tokens",
        rows,
    )


def _tell(done: Future[None]) -> None:
    if (error := done.exception()) is not None:
        log.error("what keys have used could not be written: %s", error)


def used(store: Store, since: str = "") -> list[Used]:
    """What was used, by day, key and model. `since`: the first day, as 2026-01-31."""
    rows = store.read(
        "SELECT key_id, day, model, requests, failed, prompt_tokens, cached_tokens, completion_tokens FROM usage"
        " WHERE day >= ? ORDER BY day, key_id, model",
        (since,),
    )
    names = Used.__struct_fields__
    return [Used(**dict(zip(names, row, strict=True))) for row in rows]
