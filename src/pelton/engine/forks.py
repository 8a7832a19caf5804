"""Sequences that go on from another one's tokens by sharing its blocks: the choices of a request, once their prompt is
computed, and the slots of a beam search."""

from __future__ import annotations

from pelton.engine.in_flight import InFlight
from pelton.engine.sequence import Sequence


class Forks:
    """Those of one engine, of which `max_sequences` may run. One that finds no place or no memory waits."""

    def __init__(self, in_flight: InFlight, max_sequences: int) -> None:
        self._in_flight = in_flight
        self._max_sequences = max_sequences

    def fork(self, sequence: Sequence) -> None:
        """A prompt is complete: its other choices go on from it. They have had a place all the time."""
        children, sequence.children = sequence.children, []
        for child in children:
            child.rank = sequence.rank
            self._share(sequence, child, has_place=True)

    def park(self, sequence: Sequence) -> None:
        """Take the place and the blocks of a sequence of a beam search; its tokens stay."""
        in_flight = self._in_flight
        if sequence.state == "running":
            in_flight.stop(sequence)
            in_flight.memory.release(sequence)
        elif sequence.state == "waiting":
            in_flight.waiting.remove(sequence)
            in_flight.memory.forget_saved(sequence)
        sequence.state = "parked"

    def unpark(self, sequence: Sequence) -> None:
        """A parked sequence has more to compute again."""
        if sequence.state == "parked":
            self._in_flight.wait_again(sequence)

    def refork(self, parent: Sequence, child: Sequence) -> None:
        """Make a sequence of a beam search a copy of another one."""
        self.park(child)
        child.tokens, child.rank = parent.tokens[:], parent.rank
        has_place = parent.state == "running" and self._in_flight.num_slots < self._max_sequences
        self._share(parent, child, has_place)

    def _share(self, parent: Sequence, child: Sequence, has_place: bool) -> None:
        if has_place and self._in_flight.memory.fork(parent, child):
            self._in_flight.run(child)
        else:
            self._in_flight.wait_again(child)
