"""The sequences of all requests in flight: which of them run, wait or are being read, and how one comes to another
state. Whose turn it is is decided elsewhere.

A sequence that ends while choices are still to fork from it leaves them what it has: the first of them takes its place.
"""

from __future__ import annotations

from bisect import insort

from pelton.engine.draft_policy import DraftPolicy
from pelton.engine.fetching import Fetching
from pelton.engine.kv_memory import KVMemory
from pelton.engine.pace import Pace
from pelton.engine.sequence import Sequence
from pelton.engine.steady import SteadyRun
from pelton.engine.tiers import DiskTier
from pelton.engine.waiting import WaitingQueue
from pelton.request import IDLE


class InFlight:
    """Those of one engine. `patience` is that of the `WaitingQueue`; `draft_model` follows some of them."""

    def __init__(
        self, memory: KVMemory, pace: Pace, tier: DiskTier | None, draft_model: DraftPolicy | None, *, patience: int
    ) -> None:
        self.memory = memory
        self.running: list[Sequence] = []
        """The most urgent first, then the oldest."""
        self.waiting = WaitingQueue(patience)
        self.fetching = Fetching(tier, memory, pace)
        self.draft_model = draft_model
        self.steady = SteadyRun(memory, self.waiting)
        self._pace = pace

    @property
    def has_work(self) -> bool:
        """Is there anything to schedule?"""
        return bool(self.running or self.waiting)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait, those that wait for the disk among them."""
        return len(self.waiting) + len(self.fetching.sequences)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of their prompts."""
        return self.waiting.num_tokens + sum(sequence.num_prompt for sequence in self.fetching.sequences)

    @property
    def num_slots(self) -> int:
        """Sequences that those that run stand for."""
        return sum(sequence.num_slots for sequence in self.running)

    @property
    def urgent(self) -> list[Sequence]:
        """Those of `running` that have no idle priority."""
        if not self.running or self.running[-1].rank < IDLE:
            return self.running
        return [sequence for sequence in self.running if sequence.rank < IDLE]

    def add(self, sequence: Sequence) -> None:
        """A new sequence waits. It is the youngest."""
        self.steady.end()
        self.waiting.add(sequence)

    def run(self, sequence: Sequence) -> None:
        """A sequence that has the blocks of what is computed of it takes part in the next step."""
        sequence.state = "running"
        self.steady.end()
        insort(self.running, sequence, key=lambda s: s.order)

    def stop(self, sequence: Sequence) -> None:
        """A sequence runs no more. It still has its blocks."""
        self.steady.end()
        self.running.remove(sequence)

    def wait_again(self, sequence: Sequence) -> None:
        """A sequence without blocks waits for a turn, before those that never had one."""
        self.steady.end()
        sequence.state = "waiting"
        self.waiting.put_back(sequence)

    def take_fetched(self) -> None:
        """Let sequences go on whose beginnings have come from the disk."""
        for sequence in self.fetching.take():
            self.wait_again(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, whatever its state, and give its blocks back. What it had is left in the cache."""
        self.steady.end()
        if sequence.state == "running":
            self.stop(sequence)
            if sequence.children:
                self._hand_over(sequence)
            else:
                self.memory.publish_tail(sequence)
                self.memory.release(sequence)
        elif sequence.state == "waiting":
            self.waiting.remove(sequence)
            if sequence.children:
                heir = _promote(sequence)
                heir.saved, sequence.saved = sequence.saved, None
                self.wait_again(heir)
            self.memory.forget_saved(sequence)
        elif sequence.state == "loading":
            self.fetching.leave(sequence, _promote(sequence) if sequence.children else None)
        elif sequence.state == "compiling":
            if sequence.children:
                _promote(sequence).state = "compiling"
        elif sequence.state == "forking":
            sequence.group.parent_of(sequence).children.remove(sequence)
        if self.draft_model is not None:
            self.draft_model.finish(sequence)
        self._pace.ended(sequence.num_output)
        sequence.state = "finished"

    def _hand_over(self, sequence: Sequence) -> None:
        heir = _promote(sequence)
        heir.tables, heir.node = sequence.tables, sequence.node
        heir.num_computed, heir.num_cached = sequence.num_computed, sequence.num_cached
        sequence.tables, sequence.node, sequence.num_computed = (), None, 0
        self.run(heir)

    def check(self) -> None:
        """Raise `InternalError` unless every block is accounted for."""
        self.steady.settle()
        self.memory.check([*self.running, *self.waiting, *self.fetching.sequences])
        if self.draft_model is not None:
            self.draft_model.shadows.check(self.running)


def _promote(sequence: Sequence) -> Sequence:
    """The first of the choices that would fork from a sequence takes its place."""
    heir, *others = sequence.children
    heir.children, sequence.children = others, []
    heir.rank = sequence.rank
    return heir
