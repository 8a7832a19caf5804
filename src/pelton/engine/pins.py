"""Prefixes that stay in KV memory, whatever else is asked for, until their time is over."""

from __future__ import annotations

import math
import time
from array import array
from bisect import bisect_left
from dataclasses import dataclass

from pelton.engine.budget import peak_blocks
from pelton.engine.kv_memory import KVMemory
from pelton.engine.prefix_cache import first_seen
from pelton.engine.protocol import PinInfo
from pelton.engine.sequence import Sequence
from pelton.errors import InvalidRequest, Overloaded
from pelton.ops.data import BLOCK_TOKENS, NULL_BLOCK
from pelton.request import EngineRequest

SHARE = 2
"""Pinned prefixes take this part of KV memory at the most, and never so much that one context has no room beside."""


@dataclass(frozen=True)
class _Pin:
    info: PinInfo
    end: float
    """On the engine's clock."""
    tables: tuple[array[int], ...]
    prompt_ids: list[int]
    salt: str


class Pins:
    """The pinned prefixes of one engine by the ids of the requests that asked for them. A prefix is pinned as far as it
    fills blocks. `context`: tokens that a sequence may hold."""

    def __init__(self, memory: KVMemory, context: int) -> None:
        self._memory = memory
        self._pins: dict[str, _Pin] = {}
        self._limits = tuple(
            min(pool.num_usable // SHARE, pool.num_usable - peak_blocks(context + 1, window, memory.max_chunk))
            for pool, window in zip(memory.pools, memory.windows, strict=True)
        )

    def __contains__(self, id: str) -> bool:
        return id in self._pins

    @property
    def infos(self) -> tuple[PinInfo, ...]:
        """What is pinned."""
        return tuple(pin.info for pin in self._pins.values())

    def check(self, request: EngineRequest) -> None:
        """Raise unless a request's prompt can be pinned now. Blocks that are pinned already, for a prompt that begins
        alike, take no more room."""
        if not self._memory.is_caching:
            raise InvalidRequest("there is no prefix cache here to pin anything in")
        num_tokens = len(request.prompt_ids)
        if num_tokens < BLOCK_TOKENS:
            raise InvalidRequest(
                f"the prefix has {num_tokens} tokens; {BLOCK_TOKENS} are the least to pin", param="prompt"
            )
        num_shared = self._num_shared(request)
        for group, window in enumerate(self._memory.windows):
            needed = num_tokens // BLOCK_TOKENS
            if window is not None:
                needed -= first_seen(needed * BLOCK_TOKENS, window)
            else:
                needed -= num_shared
            held = {block for pin in self._pins.values() for block in pin.tables[group] if block != NULL_BLOCK}
            if len(held) + needed > self._limits[group]:
                self._refuse(needed, len(held), self._limits[group])

    def _num_shared(self, request: EngineRequest) -> int:
        """Blocks at the beginning of a prompt that one of the pins holds."""
        most = 0
        for pin in self._pins.values():
            if pin.salt != request.cache_salt:
                continue
            num_blocks = min(len(pin.prompt_ids), len(request.prompt_ids)) // BLOCK_TOKENS
            ends = range(BLOCK_TOKENS, num_blocks * BLOCK_TOKENS + 1, BLOCK_TOKENS)
            # Alike up to one block means alike up to all before it.
            count = bisect_left(ends, True, key=lambda end: pin.prompt_ids[:end] != request.prompt_ids[:end])
            most = max(most, count)
        return most

    def _refuse(self, needed: int, held: int, limit: int) -> None:
        message = (
            f"the prefix takes {needed} blocks of KV memory, but pinned ones may take {max(limit, 0)} in all, "
            f"of which {held} are taken"
        )
        if needed > limit:
            raise InvalidRequest(f"{message}; start the engine with more KV memory or less context", param="prompt")
        first = min(pin.info.expires_at for pin in self._pins.values())
        raise Overloaded(message, retry_after=max(1.0, first - time.time()))

    def add(self, sequence: Sequence, now: float) -> None:
        """Pin the prompt of a sequence, all of which is in memory. Raises like `check`."""
        request = sequence.group.request
        self.check(request)
        tables = self._memory.pin(sequence.node)
        created = time.time()
        info = PinInfo(
            id=request.id,
            num_tokens=len(tables[0]) * BLOCK_TOKENS,
            created_at=created,
            expires_at=created + request.pin_ttl,
        )
        self._pins[request.id] = _Pin(info, now + request.pin_ttl, tables, request.prompt_ids, request.cache_salt)

    def drop(self, id: str) -> None:
        """What it pinned is cached like any other from now on. Unknown ids are ignored."""
        if (pin := self._pins.pop(id, None)) is not None:
            self._memory.unpin(pin.tables)

    @property
    def next_end(self) -> float:
        """When the time of one ends."""
        return min((pin.end for pin in self._pins.values()), default=math.inf)

    def expire(self, now: float) -> None:
        """Drop those whose time has ended."""
        for id in [id for id, pin in self._pins.items() if pin.end <= now]:
            self.drop(id)

    def clear(self) -> None:
        """Drop all."""
        for id in list(self._pins):
            self.drop(id)
