"""Sequences that wait for the disk: it has more of their beginnings than memory, and reads that faster than it is
computed."""

from __future__ import annotations

from collections.abc import Callable

from pelton.engine.kv_memory import Fetch, KVMemory, Match, namespace_of
from pelton.engine.pace import Pace
from pelton.engine.sequence import Sequence
from pelton.engine.tiers import DiskTier, Place
from pelton.ops.data import BLOCK_TOKENS

MAX_FETCHES = 2
"""How often a sequence waits for the disk. It may have to again: for what others did not ask for, or where memory ran
out in between."""


class Fetching:
    """Those of one engine. Without a `tier` there are none."""

    def __init__(self, tier: DiskTier | None, memory: KVMemory, pace: Pace) -> None:
        self.tier = tier
        self._memory = memory
        self.pace = pace
        self._to_read: list[tuple[Fetch, list[Place]]] = []

    @property
    def sequences(self) -> list[Sequence]:
        """All that wait so."""
        return [sequence for fetch in self._memory.fetches for sequence in fetch.sequences]

    def begin(self, sequence: Sequence, match: Match, fits: Callable[[int], bool]) -> int:
        """Let a sequence whose turn it is wait, where that is worth it, and give how many of its tokens it will have
        then; 0: it does not wait. `match`: what memory has of it. `fits`: is there memory for so many tokens?"""
        if self.tier is None or sequence.saved is not None or sequence.num_fetches == MAX_FETCHES:
            return 0
        namespace, start = namespace_of(sequence), match.length // BLOCK_TOKENS
        stop = self._memory.limit(sequence) // BLOCK_TOKENS
        places = self.tier.find(namespace, sequence.tokens, start, stop)
        length = (start + len(places)) * BLOCK_TOKENS
        saved = self.pace.chunk_seconds(match.length, length - match.length) if length > match.length else 0.0
        if self.tier.seconds(places) >= saved or not fits(length):
            return 0
        known = (fetch for fetch in self._memory.fetches if fetch.namespace == namespace and fetch.start == start)
        first = sequence.tokens[: (start + 1) * BLOCK_TOKENS]
        fetch = next((fetch for fetch in known if fetch.tokens[: len(first)] == first), None)
        if fetch is None:
            fetch = self._memory.set_aside(sequence, match, start + len(places))
            self._to_read.append((fetch, places))
        sequence.num_fetches += 1
        sequence.state = "loading"
        fetch.sequences.append(sequence)
        return length

    def start(self) -> None:
        """Begin to read, once the moves of the step are made: what they copy may lie in blocks that are read into."""
        while self.tier is not None and self._to_read:
            self.tier.fetch(*self._to_read.pop(0))

    def take(self) -> list[Sequence]:
        """Those whose beginnings have come since the last time: they wait for a step again."""
        come: list[Sequence] = []
        for fetch, num_blocks in () if self.tier is None else self.tier.take():
            self._memory.take_in(fetch, num_blocks)
            come += fetch.sequences
        return come

    def leave(self, sequence: Sequence, heir: Sequence | None) -> None:
        """A sequence waits no more; `heir` does in its place."""
        fetch = next(fetch for fetch in self._memory.fetches if sequence in fetch.sequences)
        fetch.sequences.remove(sequence)
        if heir is not None:
            heir.state = "loading"
            fetch.sequences.append(heir)
