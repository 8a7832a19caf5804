"""The sequences that wait, and whose turn it is.

- The lower its number, the sooner a priority's turn comes.
- Within a priority, those that have run before (preempted, or forked without a free block) come first, oldest first.
  Then the tenants share by tokens (`fairness`), each of them first come, first served.
- However many urgent requests come: once `patience` tokens were computed since a priority's last turn while it had
  sequences waiting, the next turn is its. What is admitted so is not displaced by a better priority any more.
- Idle priority has no such turn: it waits until nobody else does.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator

from pelton.engine.fairness import Shares
from pelton.engine.sequence import URGENT, Sequence
from pelton.request import IDLE


class _Level:
    """What waits at one priority."""

    def __init__(self, deadline: int) -> None:
        self.deadline = deadline
        """When its turn comes at the latest, in tokens computed."""
        self.returned: list[Sequence] = []
        self.lines: dict[str, deque[Sequence]] = {}

    def __bool__(self) -> bool:
        return bool(self.returned or self.lines)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.returned
        for line in self.lines.values():
            yield from line


class WaitingQueue:
    """`num_computed` counts the tokens that were computed for anybody; it stands in for the time."""

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.shares = Shares()
        self.num_computed = 0
        self.num_tokens = 0
        """Prompt tokens of all that wait."""
        self._levels: dict[int, _Level] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sequence]:
        """In no order that matters but within a tenant of a priority."""
        for rank in sorted(self._levels):
            yield from self._levels[rank]

    def at(self, rank: int) -> list[Sequence]:
        """Those that wait at one priority."""
        return list(self._levels[rank]) if rank in self._levels else []

    def add(self, sequence: Sequence) -> None:
        """A new sequence: the youngest."""
        level, tenant = self._level(sequence), sequence.group.tenant
        if tenant not in level.lines:
            self.shares.enter(tenant, level.lines)
            level.lines[tenant] = deque()
        level.lines[tenant].append(sequence)
        self._count(sequence, 1)

    def put_back(self, sequence: Sequence) -> None:
        """A sequence that had its turn, or takes the place of one that waited."""
        insort(self._level(sequence).returned, sequence, key=lambda s: s.order)
        self._count(sequence, 1)

    def first(self) -> Sequence:
        """The sequence whose turn it is. There must be one."""
        level = self._levels[self._next_rank()]
        if level.returned:
            return level.returned[0]
        return level.lines[self.shares.least(level.lines)][0]

    def admit(self, sequence: Sequence, num_tokens: int) -> None:
        """The sequence of `first` has its turn; so many tokens of its prompt are to be computed."""
        level, tenant = self._levels[sequence.rank], sequence.group.tenant
        if sequence not in level.returned:
            self.shares.choose(tenant, level.lines)
            self.shares.charge(tenant, num_tokens)
        level.deadline = self.num_computed + self.patience
        self.remove(sequence)
        if min(self._levels, default=sequence.rank) < sequence.rank:
            sequence.rank = URGENT

    def remove(self, sequence: Sequence) -> None:
        """It waits no more."""
        level, tenant = self._levels[sequence.rank], sequence.group.tenant
        if sequence in level.returned:
            level.returned.remove(sequence)
        else:
            level.lines[tenant].remove(sequence)
            if not level.lines[tenant]:
                del level.lines[tenant]
        if not level:
            del self._levels[sequence.rank]
        self._count(sequence, -1)

    def _next_rank(self) -> int:
        """The priority that is overdue longest, or else the best one."""
        late = [
            (level.deadline, rank)
            for rank, level in self._levels.items()
            if level.deadline <= self.num_computed and rank < IDLE
        ]
        return min(late)[1] if late else min(self._levels)

    def _level(self, sequence: Sequence) -> _Level:
        rank = sequence.rank
        if rank not in self._levels:
            self._levels[rank] = _Level(self.num_computed + self.patience)
        return self._levels[rank]

    def _count(self, sequence: Sequence, sign: int) -> None:
        self._size += sign
        self.num_tokens += sign * sequence.num_prompt
