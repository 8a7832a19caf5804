"""Block ids of one cache group: who holds them, which are free. Knows no tokens.

Every block but the null block is in exactly one of three states:

    in use   held by one or more sequences (`refs` counts them); may also be retained by the prefix cache
    idle     retained by the prefix cache alone; given out again, least recently used first, when none is free
    free     held by nobody
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from pelton.errors import InternalError
from pelton.ops.data import NULL_BLOCK


class BlockPool:
    """Reference counts and the free list of one cache group.

    `on_evict(block)` is told of an idle block just before it is given out again: the cache must forget it.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None]) -> None:
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._refs = [0] * num_blocks
        self.generations = [0] * num_blocks
        """How often each was given out: who reads one beside the steps sees whether it has changed."""
        self._retained = bytearray(num_blocks)
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_usable(self) -> int:
        """All blocks that can ever be handed out."""
        return self.num_blocks - 1

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give now: free ones, then idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def num_used(self) -> int:
        """Blocks that sequences hold."""
        return self.num_usable - self.num_available

    def is_idle(self, block: int) -> bool:
        """Is it retained by the cache and held by no sequence?"""
        return block in self._idle

    def allocate(self) -> int:
        """A block for one holder. The caller has asked `num_available` before."""
        if not self._free:
            oldest = next(iter(self._idle))
            self._on_evict(oldest)  # the cache forgets it, which frees it
        block = self._free.pop()
        self.generations[block] += 1
        self._refs[block] = 1
        return block

    def take(self, block: int) -> None:
        """One more holder of a block that is in use or idle."""
        if not self._refs[block]:
            del self._idle[block]
        self._refs[block] += 1

    def give(self, block: int, *, goes_first: bool = False) -> None:
        """One holder fewer. A block without holders turns idle (as the most recently used, or as the least) or free."""
        self._refs[block] -= 1
        if not self._refs[block]:
            if self._retained[block]:
                self._idle[block] = None
                self._idle.move_to_end(block, last=not goes_first)
            else:
                self._free.append(block)

    def touch(self, block: int) -> None:
        """Count an idle block as the most recently used; others as they are."""
        if block in self._idle:
            self._idle.move_to_end(block)

    def retain(self, block: int) -> None:
        """The cache wants a block, which is in use, to stay when its last holder has gone."""
        self._retained[block] = 1

    def forget(self, block: int) -> None:
        """The cache no longer wants it."""
        self._retained[block] = 0
        if not self._refs[block]:
            del self._idle[block]
            self._free.append(block)

    def check(self, holders: dict[int, int], retained: set[int]) -> None:
        """Raise `InternalError` unless the books agree with those of the sequences (`holders`: block -> how many
        hold it) and of the cache, and every block is accounted for exactly once."""
        refs = {block: count for block, count in enumerate(self._refs) if count}
        idle = {block for block in retained if block not in refs}
        faults = [
            fault
            for fault, is_found in {
                "reference counts differ from the sequences' tables": refs != holders,
                "retained blocks differ from the cache's": {b for b, r in enumerate(self._retained) if r} != retained,
                "idle blocks differ": set(self._idle) != idle,
                "a block is lost or free twice": sorted(self._free)
                != sorted(set(range(1, self.num_blocks)) - refs.keys() - idle),
            }.items()
            if is_found
        ]
        if faults:
            raise InternalError(f"block pool: {'; '.join(faults)}")
