"""The disk tier below the prefix cache: what was computed once is there after a restart or a crash.

Two threads beside the steps. One writes blocks that the tree has, out of KV memory: those of prompts that are long
enough, one file per run of blocks, and never more than the disk deserves (`WriteBudget`). The other reads blocks that a
waiting sequence begins with into KV memory that was set aside for it (`Fetch`). Neither holds up a step. The tier is
closed until the numerics fingerprint is known.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from pelton.engine import segments
from pelton.engine.background import BUSY_WAIT
from pelton.engine.blocks import BlockPool
from pelton.engine.kv_memory import Fetch
from pelton.engine.prefix_cache import Node, first_seen
from pelton.engine.segments import Segment
from pelton.formats.bounded_folder import BoundedFolder
from pelton.ops.data import BLOCK_TOKENS, NULL_BLOCK

log = logging.getLogger(__name__)

LEAST = 8
"""Blocks of a prompt that is worth a file when nobody else has used it yet."""
MAX_SEGMENT = 64
"""Blocks in a file, and no more than a sixteenth of the limit."""
MAX_OFFERS = 64
"""Prefixes that wait to be written; over that the oldest are forgotten."""
FIRST_PRICE = 2e-9
"""Seconds per byte that is read, until some were."""


class Store(Protocol):
    """Where the backend's bytes of blocks come from and go to."""

    def read_block(self, group: int, block: int) -> bytes:
        """The opaque bytes of a block."""
        ...

    def write_block(self, group: int, block: int, data: bytes) -> None:
        """Write back what `read_block` gave."""
        ...


class WriteBudget:
    """How many bytes may be written now: a quarter of the limit at once, and the whole limit within an hour. What
    nobody has used twice yet leaves half of that to what has been."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._left = limit / 4
        self._last = clock()

    def take(self, num_bytes: int, *, is_shared: bool) -> bool:
        """May so many bytes be written?"""
        now = self._clock()
        self._left = min(self._limit / 4, self._left + (now - self._last) * self._limit / 3600)
        self._last = now
        if self._left - num_bytes < (0 if is_shared else self._limit / 8):
            return False
        self._left -= num_bytes
        return True


@dataclass(frozen=True)
class Place:
    """Block `index` of a file."""

    file: str
    segment: Segment
    index: int

    def has(self, group: int) -> bool:
        """Are there bytes of that group?"""
        return self.segment.blocks[self.index].sizes[group] > 0

    @property
    def num_bytes(self) -> int:
        """Of all groups."""
        return sum(self.segment.blocks[self.index].sizes)


@dataclass
class Offer:
    """A prefix that could be written: the nodes of its full blocks from the root on, and how many of them have been
    used by two."""

    salt: str
    tokens: array[int]
    nodes: list[Node]
    num_shared: int


class DiskTier:
    """All methods but the threads' own belong to the engine's thread. `tell` is called from others when `take` has
    something."""

    def __init__(
        self,
        folder: BoundedFolder,
        store: Store,
        pools: Sequence[BlockPool],
        windows: Sequence[int | None],
        block_bytes: Sequence[int],
        *,
        is_busy: Callable[[], bool],
        tell: Callable[[], None],
    ) -> None:
        self.num_read = self.num_written = 0
        """Bytes."""
        self._folder = folder
        self._store = store
        self._pools = pools
        self._windows = tuple(windows)
        self._block_bytes = tuple(block_bytes)
        self._is_busy = is_busy
        self._tell = tell
        self._budget = WriteBudget(folder.limit)
        self._max_segment = max(1, min(MAX_SEGMENT, folder.limit // 16 // max(1, sum(block_bytes))))
        self._price = FIRST_PRICE
        self._prefix = self._fingerprint = ""
        self._places: dict[bytes, Place] = {}
        self._offers: deque[Offer] = deque(maxlen=MAX_OFFERS)
        self._fetches: deque[tuple[Fetch, list[Place]]] = deque()
        self._fetched: deque[tuple[Fetch, int]] = deque()
        self._has_offers, self._has_fetches = threading.Event(), threading.Event()
        self._end = threading.Event()
        self._threads = [
            threading.Thread(target=self._write_all, name="prefix writer", daemon=True),
            threading.Thread(target=self._read_all, name="prefix reader", daemon=True),
        ]

    def open(self, digest: str, fingerprint: str) -> None:
        """The model's digest and the numerics fingerprint are known: look what is there, and begin."""
        self._prefix, self._fingerprint = f"{digest}-{fingerprint}-", fingerprint
        for name in self._folder.names(self._prefix):
            file = self._folder.open(name, is_use=False)
            if file is not None:
                with file:
                    segment = segments.read_header(file)
                if segment is None:
                    self._folder.discard(name)
                else:
                    self._learn(name, segment)
        for thread in self._threads:
            thread.start()

    def _learn(self, name: str, segment: Segment) -> None:
        for index, block in enumerate(segment.blocks):
            self._places[block.name] = Place(name, segment, index)

    def close(self) -> None:
        """Have the threads stop. What is being written is given up."""
        self._end.set()
        self._has_offers.set()
        self._has_fetches.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(1.0)

    # reading

    def find(self, salt: str, tokens: Sequence[int], start: int, stop: int) -> list[Place]:
        """Where blocks [start, stop) of a prompt are, as far as they are there, and such that what comes behind them
        sees all that it must."""
        if not self._places or start >= stop:
            return []
        places: list[Place] = []
        for index, name in enumerate(segments.chain(self._fingerprint, salt, tokens[: stop * BLOCK_TOKENS])):
            if index >= start:
                place = self._places.get(name)
                if place is None:
                    break
                places.append(place)
        while places and not self._is_servable(places, start):
            places.pop()
        return places

    def _is_servable(self, places: list[Place], start: int) -> bool:
        end = start + len(places)
        return all(
            place.has(group)
            for group, window in enumerate(self._windows)
            for place in places[max(0, _first(end, window) - start) :]
        )

    def seconds(self, places: Sequence[Place]) -> float:
        """How long it takes to read them, about, behind all that is asked for already."""
        waiting = sum(place.num_bytes for _, before in list(self._fetches) for place in before)
        return self._price * (waiting + sum(place.num_bytes for place in places))

    def fetch(self, fetch: Fetch, places: list[Place]) -> None:
        """Read blocks into the memory that `fetch` has for them; `take` tells when that is done."""
        self._fetches.append((fetch, places))
        self._has_fetches.set()

    @property
    def is_ready(self) -> bool:
        """Would `take` give anything?"""
        return bool(self._fetched)

    def take(self) -> list[tuple[Fetch, int]]:
        """What has been read since the last call, each with how many of its blocks are there."""
        return [self._fetched.popleft() for _ in range(len(self._fetched))]

    def _read_all(self) -> None:
        while self._has_fetches.wait() and not self._end.is_set():
            self._has_fetches.clear()
            while self._fetches and not self._end.is_set():
                fetch, places = self._fetches[0]
                began, before = time.monotonic(), self.num_read
                num_blocks = self._read(fetch, places)
                if num_bytes := self.num_read - before:
                    self._price += ((time.monotonic() - began) / num_bytes - self._price) / 4
                self._fetches.popleft()
                self._fetched.append((fetch, num_blocks))
                self._tell()

    def _read(self, fetch: Fetch, places: list[Place]) -> int:
        """How many of the blocks could be read."""
        try:
            with ExitStack() as stack:
                files: dict[str, BinaryIO] = {}
                for name in reversed(dict.fromkeys(place.file for place in places)):  # beginnings are used last
                    if (file := self._folder.open(name)) is not None:
                        files[name] = stack.enter_context(file)
                for number, place in enumerate(places):
                    if place.file not in files or not self._read_block(files[place.file], place, fetch, number):
                        self._forget(place.file)
                        return number
        except Exception:
            log.warning("cached prefixes could not be read from disk", exc_info=True)
            return 0
        return len(places)

    def _read_block(self, file: BinaryIO, place: Place, fetch: Fetch, number: int) -> bool:
        for group, table in enumerate(fetch.tables):
            block = table[fetch.start + number]
            if block == NULL_BLOCK:
                continue
            data = segments.read(file, place.segment, place.index, group)
            if data is None:
                return False
            self._store.write_block(group, block, data)
            self.num_read += len(data)
        return True

    def _forget(self, name: str) -> None:
        """A file is damaged, or has been removed."""
        self._folder.discard(name)
        for key, place in list(self._places.items()):
            if place.file == name:
                self._places.pop(key, None)

    # writing

    def offer(self, salt: str, tokens: array[int], node: Node | None, num_shared: int) -> None:
        """A prompt is in memory: `tokens` of full blocks down to `node`, `num_shared` of which were there before it."""
        nodes: list[Node] = []
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        if num_shared or len(nodes) >= LEAST:
            self._offers.append(Offer(salt, tokens, nodes[::-1], num_shared))
            self._has_offers.set()

    def _write_all(self) -> None:
        while self._has_offers.wait() and not self._end.is_set():
            self._has_offers.clear()
            while self._offers and not self._end.is_set():
                offer = self._offers.popleft()
                names = list(segments.chain(self._fingerprint, offer.salt, offer.tokens))
                if not self._write_new(names, offer):
                    return

    def _write_new(self, names: list[bytes], offer: Offer) -> bool:
        """Write what is not there yet. False: nothing can be written."""
        start = 0
        while start < len(names) and not self._end.is_set():
            if names[start] in self._places:
                start += 1
                continue
            stop = min(start + self._max_segment, len(names))
            stop = next((index for index in range(start, stop) if names[index] in self._places), stop)
            num_bytes = segments.planned_bytes(stop - start, self._block_bytes)
            if not self._budget.take(num_bytes, is_shared=start < offer.num_shared):
                return True
            state = self._write(names[start:stop], offer.nodes[start:stop], num_bytes)
            if state != "written":
                return state == "gone"
            start = stop
        return True

    def _write(self, names: list[bytes], nodes: list[Node], num_bytes: int) -> str:
        """Write one file. "written"; "gone": the blocks are not in memory any more, or it is time to end; "failed"."""
        written: list[Segment] = []
        is_gone = False

        def fill(file: BinaryIO) -> bool:
            nonlocal is_gone
            segment = segments.write(file, names, len(self._windows), lambda index: self._copy(nodes[index]))
            if segment is None:
                is_gone = True
                return False
            written.append(segment)
            return True

        name = f"{self._prefix}{uuid.uuid4().hex}"
        if not self._folder.write(name, num_bytes, fill):
            return "gone" if is_gone else "failed"
        self._learn(name, written[0])
        self.num_written += written[0].num_bytes
        return "written" if len(written[0].blocks) == len(names) else "gone"

    def _copy(self, node: Node) -> list[bytes] | None:
        """The bytes of a node's blocks; None where it is not in the tree any more. Steps run meanwhile and may take a
        block for something else: then it does not count what was read."""
        if not self._permit():
            return None
        blocks = list(node.blocks)
        before = [pool.generations[block] for pool, block in zip(self._pools, blocks, strict=True)]
        data: list[bytes] = []
        for group, block in enumerate(blocks):
            data.append(self._store.read_block(group, block) if block != NULL_BLOCK else b"")
        for group, (pool, block) in enumerate(zip(self._pools, blocks, strict=True)):
            if block == NULL_BLOCK:
                continue
            if node.blocks[group] != block or pool.generations[block] != before[group]:
                if self._windows[group] is None:
                    return None
                data[group] = b""
        return data if node.is_linked else None

    def _permit(self) -> bool:
        """Waits while there is something better to do. False: it is time to end."""
        if self._is_busy():
            return not self._end.wait(BUSY_WAIT)
        return not self._end.is_set()


def _first(end: int, window: int | None) -> int:
    """The first block that the token behind `end` blocks sees."""
    return 0 if window is None else first_seen(end * BLOCK_TOKENS, window)
