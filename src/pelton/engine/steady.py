"""Steps that are like the one before: the same sequences, a token more each.

While nothing else happens, the `Work` of such a step stands for the next one too, and steps of streams that are told
plainly look at no sequence: what those have drawn is given to them when somebody asks (`settle`).
"""

from __future__ import annotations

from pelton.engine.fairness import OUTPUT
from pelton.engine.kv_memory import KVMemory
from pelton.engine.plain import PlainRun
from pelton.engine.sequence import Sequence
from pelton.engine.waiting import WaitingQueue
from pelton.engine.work import Work
from pelton.ops.data import BLOCK_TOKENS

MOST_BEHIND = 256
"""Steps after which sequences get what they have drawn, at the latest."""


def goes_on(sequence: Sequence) -> bool:
    """Has it one token to compute, behind which the next one of its answer is drawn, as in the step before?"""
    is_alone = not sequence.children and sequence.group.beams is None
    return sequence.num_new == 1 and sequence.num_output > 0 and not sequence.draft and is_alone


class SteadyRun:
    """The last step's work while the next one can be the same; `waiting` is told what its steps have computed."""

    def __init__(self, memory: KVMemory, waiting: WaitingQueue) -> None:
        self._memory = memory
        self._waiting = waiting
        self._work: Work | None = None

    def begin(self, work: Work) -> None:
        """The steps after this one are like it, until `end`."""
        self._work = work

    def end(self) -> None:
        """The next step is not the last one again."""
        self.settle()
        self._work = None

    def next(self) -> Work | None:
        """The last step's work as the next one's, whose blocks its sequences have; None: it is not the same."""
        work = self._work
        if work is None:
            return None
        if work.retabled:
            sequences = list(work.chunks)
            for sequence in (sequences[place] for place in work.retabled):
                if not self._memory.has_place(sequence, 1):
                    if self._memory.room(sequence) < 1:
                        return None
                    self._memory.grow(sequence, 1)
        work.repeat()
        return work

    def commit(self, work: Work) -> None:
        """A steady step has run: its tokens are in memory."""
        work.retabled = []
        for place, sequence in enumerate(work.chunks):
            if (sequence.num_computed + 1) % BLOCK_TOKENS in self._memory.phases:
                self._memory.commit(sequence, 1)
                work.retabled.append(place)
            else:
                sequence.num_computed += 1
        self._count(work, 1)

    def go_on(self, work: Work, plain: PlainRun, drawn: bytes) -> None:
        """A steady step has run in which the sequences drew these tokens, and all of them go on."""
        work.retabled = plain.add(drawn)
        for place in work.retabled:
            plain.settle(place)
            sequence = plain.sequences[place]
            sequence.num_computed -= 1  # the step's own token is about to be counted
            self._memory.commit(sequence, 1)
        if plain.num_behind == MOST_BEHIND:
            self.settle()

    def settle(self) -> None:
        """Give sequences the tokens that they have drawn in steps that did not look at them."""
        work = self._work
        if work is None or work.plain is None or not work.plain.num_behind:
            return
        self._count(work, work.plain.num_behind)
        work.plain.settle_all()

    def _count(self, work: Work, num_steps: int) -> None:
        """So many steady steps were computed."""
        self._waiting.num_computed += num_steps * len(work.chunks)
        for tenant, num_tokens in work.tenants.items():
            self._waiting.shares.charge(tenant, OUTPUT * num_steps * num_tokens)
