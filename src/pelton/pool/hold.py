"""One model that takes memory, from the first request for it until it is gone."""

from __future__ import annotations

import asyncio
import math
import time
from contextvars import Context
from typing import TYPE_CHECKING

from pelton.pool.cards import Resident, State
from pelton.pool.room import Held
from pelton.pool.spec import ModelSpec

if TYPE_CHECKING:
    from pelton.service import Service


class Hold:
    """The state of one model. The pool alone changes it; times are the event loop's."""

    task: asyncio.Task[Service]
    """The load."""
    context: Context
    """Of all that is done to it."""

    def __init__(self, spec: ModelSpec, now: float) -> None:
        self.spec = spec
        self.service: Service | None = None
        self.share = 0.0
        self.num_users = 0
        """Requests in flight, those that wait for the load included."""
        self.num_idle_users = 0
        """Of those, the ones at idle priority, which keep nobody out."""
        self.used_at = now
        self.wanted_at = -math.inf
        """When the last request that was none of those began or ended."""
        self.keep_alive = spec.keep_alive
        self.timer: asyncio.TimerHandle | None = None
        self.memory = 0
        """Bytes of the budget that are its own."""
        self.is_waiting = True
        """For its file, its turn and room."""
        self.has_turn = False
        self.loading_pid: int | None = None
        self.is_preload = False
        """Was it asked for by whoever runs this? Then it may be fetched; but no other leaves for it."""
        self.is_leaving = False
        self.leaves_for: Hold | None = None
        """Who needs the room, where it leaves for one that could still give up."""
        self.closing: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        """What listings call it."""
        return self.spec.name

    @property
    def is_idle(self) -> bool:
        """Is it loaded, and does nobody use it but at idle priority?"""
        return self.service is not None and self.num_users == self.num_idle_users

    @property
    def is_for_idle(self) -> bool:
        """Is it loaded for what runs at idle priority alone?"""
        return not self.is_preload and self.num_users == self.num_idle_users

    @property
    def pid(self) -> int | None:
        """Of its engine's process."""
        return self.loading_pid if self.service is None else self.service.engine.pid

    @property
    def state(self) -> State:
        """In a word."""
        if self.is_leaving:
            return "leaving"
        if self.service is not None:
            return "ready"
        return "waiting" if self.is_waiting else "loading"

    def held(self, *, can_leave: bool) -> Held:
        """As policy sees it."""
        return Held(self.name, self.memory, self.is_idle, self.wanted_at, can_leave, self.is_leaving)

    def card(self, now: float) -> Resident:
        """As listings see it. `now`: the event loop's time."""
        wall = time.time() - now
        info = None if self.service is None else self.service.engine.info
        return Resident(
            name=self.name,
            model=self.spec.model,
            state=self.state,
            share=1.0 if self.service is not None else self.share,
            num_requests=self.num_users,
            expires_at=None if self.timer is None else wall + self.timer.when(),
            used_at=wall + self.used_at,
            pid=self.pid,
            context=None if info is None else info.context,
            memory=self.memory,
            weight_bytes=0 if info is None else info.weight_bytes,
            kv_bytes=0 if info is None else info.kv_bytes,
            arena_bytes=0 if info is None else info.arena_bytes,
        )
