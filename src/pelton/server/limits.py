"""Requests and tokens per minute of each key: token buckets in the store, so that all processes which share it, and
those that are started later, keep one limit.

A bucket holds what a minute may have, and fills steadily. A request takes 1 from the one and, before it runs, what its
tokens are expected to be from the other; what it really used is set off at its end, which may leave the bucket in debt.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Literal

import msgspec

from pelton.errors import RateLimited
from pelton.server.keys import Key
from pelton.server.store import Connection, Store

Kind = Literal["requests", "tokens"]
MINUTE = 60.0


class Bucket(msgspec.Struct, frozen=True):
    """A limit as it stands: `remaining` of `limit`, full again in `reset` seconds."""

    limit: int
    remaining: int
    reset: float


class Limits:
    """The limits of one key, for the time of one request."""

    def __init__(self, store: Store | None, key: Key, account: str = "") -> None:
        """`account`: limits of the same height, counted apart from those of others."""
        self._store = store
        self._key = key
        self._account = account
        self.buckets: dict[Kind, Bucket] = {}
        """As they were last seen."""

    def limit(self, kind: Kind) -> int | None:
        """What a minute may have; None: any number."""
        return self._key.rpm if kind == "requests" else self._key.tpm

    async def take(self, kind: Kind, amount: int) -> int:
        """Take so much, or all that the bucket can hold, and return how much that was. Raises `RateLimited`."""
        limit = self.limit(kind)
        if limit is None or self._store is None:
            return 0
        amount = min(amount, limit)
        taking = self._store.write(self._change(kind, limit, amount, must_have=True))
        try:
            before, after, is_taken = await asyncio.wrap_future(taking)
        except asyncio.CancelledError:  # it may be taken still, in the store's thread, and nobody would give it back
            taking.add_done_callback(lambda taken: self._give_back(kind, amount, taken))
            raise
        self.buckets[kind] = Bucket(limit, max(0, math.floor(after)), (limit - after) * MINUTE / limit)
        if not is_taken:
            wait = (amount - before) * MINUTE / limit
            raise RateLimited(
                f"the key {self._key.name!r} may have {limit} {kind} per minute, which are used up; "
                f"try again in {math.ceil(wait)} s",
                retry_after=wait,
            )
        return amount

    def _give_back(self, kind: Kind, amount: int, taking: Future[tuple[float, float, bool]]) -> None:
        if not taking.cancelled() and taking.exception() is None and taking.result()[2]:
            self.settle(kind, -amount)

    def settle(self, kind: Kind, amount: int) -> None:
        """Take so much more, or give back where it is negative, whatever is there. Does not wait for the store."""
        limit = self.limit(kind)
        if amount and limit is not None and self._store is not None:
            self._store.write(self._change(kind, limit, amount, must_have=False))

    def _change(
        self, kind: Kind, limit: int, amount: int, *, must_have: bool
    ) -> Callable[[Connection], tuple[float, float, bool]]:
        """Work for the store that gives the level before and after, and whether `amount` was taken."""
        key_id, kind_there = self._key.id, self._account + kind

        def change(connection: Connection) -> tuple[float, float, bool]:
            now = time.time()
            row = connection.execute(
                "SELECT level, at FROM buckets WHERE key_id = ? AND kind = ?", (key_id, kind_there)
            ).fetchone()
            level, at = (limit, now) if row is None else row
            before = min(limit, level + max(0.0, now - at) * limit / MINUTE)
            is_taken = before >= amount or not must_have
            after = min(limit, before - amount) if is_taken else before
            values = (key_id, kind_there, after, max(at, now))
            connection.execute("INSERT OR REPLACE INTO buckets VALUES (?, ?, ?, ?)", values)
            return before, after, is_taken

        return change

    def headers(self) -> list[tuple[bytes, bytes]]:
        """What an answer says of them, under the names that OpenAI uses."""
        told: list[tuple[bytes, bytes]] = []
        for kind, bucket in self.buckets.items():
            for name, value in (
                ("limit", str(bucket.limit)),
                ("remaining", str(bucket.remaining)),
                ("reset", duration(bucket.reset)),
            ):
                told.append((f"x-ratelimit-{name}-{kind}".encode(), value.encode()))
        return told


def duration(seconds: float) -> str:
    """As OpenAI writes it: 250ms, 12.5s, 1m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(round(seconds, 1), 60)
    return f"{int(minutes)}m{rest:g}s" if minutes else f"{rest:g}s"
