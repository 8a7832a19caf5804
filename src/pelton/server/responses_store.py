"""Responses that are kept, with what was asked, in the server's store. The key that made one sees it; on a server
without keys everybody does."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import NamedTuple

import msgspec

from pelton.config import ServerConfig
from pelton.errors import InvalidRequest, NotFound, PeltonError, Unavailable
from pelton.server.context import current
from pelton.server.keys import ANYONE, Key
from pelton.server.presence import Presence
from pelton.server.responses_types import Item, OutputItem, Response, ResponseError
from pelton.server.store import Connection, Store

MAX_ROWS = 100_000
MAX_THREAD = 32 << 20
"""Bytes of all that is stored of one thread of responses, and of those that one input refers to."""
MAX_TURNS = 10_000
"""Responses of one thread."""
SLACK = 64
"""A part of the bounds in so many is let pass before the next look at them, which is then under them by so much."""
_THREAD = (
    "WITH RECURSIVE thread (id, turn) AS (SELECT ?, 1 UNION ALL SELECT r.previous_id, turn + 1 FROM responses r"
    f" JOIN thread USING (id) WHERE r.previous_id IS NOT NULL AND turn <= {MAX_TURNS})"
)


class ResponseNotFound(NotFound):
    """There is no such response, or it is another key's."""


class PreviousNotFound(InvalidRequest):
    """A response that goes on with one that there is not."""

    code = "previous_response_not_found"


class Stored(NamedTuple):
    """What is kept of a response."""

    response: Response
    input: list[Item]
    runner: str | None
    """The process that runs it in the background; None: none does."""
    num_bytes: int


class _Output(msgspec.Struct):
    output: list[OutputItem]


class ResponseStore:
    """Responses of a store."""

    def __init__(self, store: Store | None, config: ServerConfig) -> None:
        self._store = store
        self._max_bytes = config.responses_size
        self._max_age = config.responses_max_age
        self._num_added, self._bytes_added = MAX_ROWS, 0
        """Since the last look at the bounds; at first nobody knows."""
        self.presence = None if store is None else Presence(store.path)
        self._held: set[str] = set()
        """Those in the background whose end this process knows, or will, and has yet to write."""
        if store is not None and self.keeps:
            store.write(lambda connection: self._prune(connection, 0))

    @property
    def keeps(self) -> bool:
        """Is there a place for any?"""
        return self._store is not None and self._max_bytes > 0 and self._max_age > 0

    @property
    def store(self) -> Store:
        """Where they are. Raises `Unavailable` where there is no place for them."""
        if self._store is None or not self.keeps:
            raise Unavailable("this server stores no responses")
        return self._store

    async def add(self, response: Response, input: list[Item], *, runner: str | None = None) -> None:
        """Keep one, and those that it goes on with for as long again. Others go where there are too many, those that
        were not used for longest first. Raises `Unavailable` where it cannot be written."""
        input_blob, blob = msgspec.json.encode(input), msgspec.json.encode(response)
        now, size = time.time(), len(input_blob) + len(blob)
        if size > self._max_bytes - self._max_bytes // SLACK:
            raise Unavailable(f"a response of {size} bytes is over what this server keeps, {self._max_bytes}")
        row = (response.id, current().key.id, response.previous_response_id, runner, now, now, input_blob, blob, size)

        def insert(connection: Connection) -> None:
            connection.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
            connection.execute(
                f"{_THREAD} UPDATE responses SET used_at = ? WHERE id IN (SELECT id FROM thread)", (response.id, now)
            )
            self._prune(connection, size)

        if runner is not None:
            self._held.add(response.id)
        try:
            await self.store.written(insert)
        except BaseException:
            self._held.discard(response.id)
            raise

    async def update(self, response: Response) -> None:
        """A response that ran in the background has ended. One that was deleted meanwhile stays deleted."""
        blob = msgspec.json.encode(response)

        def change(connection: Connection) -> None:
            connection.execute(
                "UPDATE responses SET response = ?, runner = NULL, num_bytes = length(input) + ? WHERE id = ?",
                (blob, len(blob), response.id),
            )
            self._prune(connection, len(blob))

        await self.store.written(change)
        self._held.discard(response.id)

    def let_go(self, id: str) -> None:
        """The end of a response in the background is kept no longer, though it could not be written: it has failed."""
        self._held.discard(id)

    def _prune(self, connection: Connection, added: int) -> None:
        """Remove what is too old or too much, after so many bytes were added; of the latter none that runs still."""
        connection.execute("DELETE FROM responses WHERE used_at < ?", (time.time() - self._max_age,))
        self._num_added += 1
        self._bytes_added += added
        if self._num_added < MAX_ROWS // SLACK and self._bytes_added < self._max_bytes // SLACK:
            return
        self._num_added = self._bytes_added = 0
        most, most_bytes = MAX_ROWS - MAX_ROWS // SLACK, self._max_bytes - self._max_bytes // SLACK
        count, size = connection.execute("SELECT count(*), coalesce(sum(num_bytes), 0) FROM responses").fetchone()
        if count <= most and size <= most_bytes:
            return
        gone: list[tuple[int]] = []
        oldest = "SELECT rowid, num_bytes, id, runner FROM responses ORDER BY used_at, rowid"
        for rowid, num_bytes, id, runner in connection.execute(oldest):
            if count <= most and size <= most_bytes:
                break
            if runner is not None and self._why_dead(id, runner) is None:
                continue
            gone.append((rowid,))
            count, size = count - 1, size - num_bytes
        connection.executemany("DELETE FROM responses WHERE rowid = ?", gone)

    async def get(self, id: str) -> Stored:
        """One that the caller may see. Raises `ResponseNotFound`. One that was under way when its server died has
        failed."""
        key = current().key
        rows = []
        if self.keeps:
            rows = self.store.read(
                "SELECT key_id, response, input, runner, num_bytes FROM responses WHERE id = ? AND used_at >= ?",
                (id, time.time() - self._max_age),
            )
        if not rows or not sees(key, rows[0][0]):
            raise ResponseNotFound(f"there is no response {id[:200]!r}, or not any more")
        _, blob, input_blob, runner, num_bytes = rows[0]
        response = msgspec.json.decode(blob, type=Response)
        if runner is not None and (why := self._why_dead(id, runner)):
            runner, response = None, _died(response, why)
            with suppress(Unavailable):  # the next one who asks sees the same
                await self.update(response)
        return Stored(response, msgspec.json.decode(input_blob, type=list[Item]), runner, num_bytes)

    def _why_dead(self, id: str, runner: str) -> str | None:
        """Why nobody will write the end of a response in the background. None: this process will, or another one."""
        if self.presence is not None and self.presence.is_mine(runner):
            return None if id in self._held else "the server could not store this response when it ended: ask again"
        if self.presence is not None and self.presence.is_alive(runner):
            return None
        return "the server ended while this response was under way in the background: ask again"

    async def previous(self, id: str) -> list[Item]:
        """All items of a thread up to this response, its output included. Raises `PreviousNotFound` where a part of it
        is not there."""
        param = "previous_response_id"
        try:
            head = (await self.get(id)).response
        except ResponseNotFound:
            why = "" if self.keeps else ": this server stores no responses"
            raise PreviousNotFound(f"previous response {id[:200]!r} not found{why}", param=param) from None
        if head.status not in ("completed", "incomplete"):
            raise InvalidRequest(f"response {id} is {head.status}: nothing can go on with it", param=param)
        return await self.thread(id)

    async def thread(self, id: str) -> list[Item]:
        """All items up to a response, its output included. Raises `PreviousNotFound` where a part is missing."""
        param = "previous_response_id"
        turns = self.store.read(
            f"{_THREAD} SELECT thread.id, num_bytes FROM thread LEFT JOIN responses USING (id)", (id,)
        )
        if gone := [turn for turn, num_bytes in turns if num_bytes is None]:
            message = f"response {id} goes on with {gone[0]}, which was deleted: the thread is not whole any more"
            raise PreviousNotFound(message, param=param)
        if len(turns) > MAX_TURNS or sum(num_bytes for _, num_bytes in turns) > MAX_THREAD:
            message = f"the thread of {id} is over {MAX_TURNS} responses or {MAX_THREAD} bytes"
            raise InvalidRequest(message, param=param)
        rows = self.store.read(
            f"{_THREAD} SELECT input, response FROM thread JOIN responses USING (id) ORDER BY turn DESC", (id,)
        )
        return await asyncio.to_thread(_items, rows)  # a tenth of a second and more, of which others get a part

    async def delete(self, id: str) -> None:
        """Forget one that the caller may see, on the disk, too. Raises `ResponseNotFound`."""
        await self.get(id)
        await self.store.erased(lambda connection: connection.execute("DELETE FROM responses WHERE id = ?", (id,)))
        self._held.discard(id)

    def close(self) -> None:
        """The server ends."""
        if self.presence is not None:
            self.presence.close()


def _items(rows: list[tuple[bytes, bytes]]) -> list[Item]:
    items: list[Item] = []
    for input_blob, blob in rows:
        items += msgspec.json.decode(input_blob, type=list[Item])
        items += msgspec.json.decode(blob, type=_Output).output
    return items


def sees(key: Key, owner: str) -> bool:
    """May this key see what one of that id has made?"""
    return key is ANYONE or key.id == owner


def not_stored(response: Response, error: PeltonError) -> Response:
    """How a response is told that could not be stored: it is none the worse for that."""
    warnings = [*(response.warnings or ()), f"this response could not be stored: {error.message}"]
    return msgspec.structs.replace(response, store=False, warnings=warnings)


def _died(response: Response, why: str) -> Response:
    error = ResponseError(code="server_error", message=why, type="server_error")
    return msgspec.structs.replace(response, status="failed", error=error)
