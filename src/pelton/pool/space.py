"""The memory that models share: which of them leave for another one, and how much that may take."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from pelton.config import PoolConfig
from pelton.engine import machine
from pelton.engine.protocol import Needs
from pelton.errors import InsufficientMemory, Unavailable
from pelton.pool.cards import Memory
from pelton.pool.hold import Hold
from pelton.pool.room import Leave, Room, make_room

OVERHEAD = 160 << 20
"""Bytes of a model beside its plan: its engine's Python, and its vocabulary in this process."""


class NoRoomNow(Unavailable):
    """What runs at idle priority finds no room beside what others use."""


class Space:
    """The models that take memory or are about to, and what of it is left. All methods belong to one event loop."""

    def __init__(self, settings: PoolConfig, retire: Callable[[Hold], None], *, in_process: bool) -> None:
        """`retire` lets a model go as soon as nobody uses it. `in_process`: engines take this process's memory."""
        self.holds: dict[str, Hold] = {}
        """By name. Whoever changes one, or which there are, calls `notify`."""
        self._settings = settings
        self._retire = retire
        self._in_process = in_process
        self._budget = int(settings.memory_budget) or machine.free_memory()
        self._changed = asyncio.Event()

    @property
    def memory(self) -> Memory:
        """What all share."""
        return Memory(budget=self._budget, used=sum(hold.memory for hold in self.holds.values()))

    async def find_room(self, hold: Hold, needs: Needs) -> int:
        """Bytes of memory that a model may take, once they are there."""
        try:
            while True:
                others = [each for each in self.holds.values() if not each.is_waiting]
                room = self._room(hold, needs, others)
                if isinstance(room, Room):
                    hold.is_waiting = False
                    return room.memory
                for each in others:
                    if each.name in room.names and not each.is_leaving:
                        each.leaves_for, each.is_leaving = hold, True
                        if each.is_idle:
                            self._retire(each)
                        self.notify()
                await self.change()
        finally:
            self._let_stay(hold)

    def _room(self, hold: Hold, needs: Needs, others: list[Hold]) -> Room | Leave:
        """What must happen to the others before this one can be loaded."""

        def room(*, can_leave: bool) -> Room | Leave:
            return make_room(
                hold.name,
                needs.least + OVERHEAD,
                needs.usual + OVERHEAD,
                [each.held(can_leave=can_leave) for each in others],
                available=self._left(others),
                max_models=self._settings.max_loaded_models,
            )

        if not hold.is_for_idle:
            return room(can_leave=not hold.is_preload)
        try:
            return room(can_leave=False)
        except InsufficientMemory:
            room(can_leave=True)  # raises where there is never any
            raise NoRoomNow(f"there is no room for {hold.name} beside the models that others use") from None

    def _let_stay(self, hold: Hold) -> None:
        """Nobody leaves for that one any more who has not gone yet."""
        for each in self.holds.values():
            if each.leaves_for is hold:
                each.leaves_for = None
                each.is_leaving = each.closing is not None
        self.notify()

    def _left(self, others: Iterable[Hold]) -> int:
        """Bytes of the budget that nobody has, as far as the machine has them now."""
        budget, free = self._budget, machine.free_memory()
        for each in others:
            budget -= each.memory
            if not self._in_process:  # what is promised, and not taken yet
                free -= max(0, each.memory - machine.private_memory(each.pid))
        return max(0, min(budget, free))

    async def change(self) -> None:
        """Wait until something has changed."""
        await self._changed.wait()

    def notify(self) -> None:
        """Something has."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
