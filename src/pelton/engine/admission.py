"""Who is let in, and who gives way.

- What waits is bounded, in sequences and in tokens of their prompts.
- Waiting sequences are admitted in the order of `waiting`: by priority, then fair among tenants, then by age, as long
  as their prompts fit into the KV memory that is left. A sequence displaces running ones of a worse priority.
- None of idle priority is admitted while others run.
- One that is preempted gives everything back, waits, and is computed again later (out of the prefix cache, if its
  blocks are still there), or copied to host memory and back where that is faster. Its output so far stays its output.
"""

from __future__ import annotations

from functools import partial

from pelton.engine.in_flight import InFlight
from pelton.engine.kv_memory import Match
from pelton.engine.pace import Pace, Shape
from pelton.engine.sequence import Sequence
from pelton.engine.work import Work
from pelton.request import IDLE


class Admission:
    """Into the steps of one engine. `max_sequences` is how many run at once, a choice that is still to fork included;
    `max_queue` and `max_queue_tokens` bound what waits beyond those."""

    def __init__(
        self, in_flight: InFlight, pace: Pace, *, max_sequences: int, max_queue: int, max_queue_tokens: int
    ) -> None:
        self.pace = pace
        self.max_sequences = max_sequences
        self.max_queue = max_queue
        self.max_queue_tokens = max_queue_tokens
        self.num_preempted = self.num_swapped = 0
        self._in_flight = in_flight
        self._memory = in_flight.memory
        self._waiting = in_flight.waiting

    def is_full(self, num_tokens: int, priority: int = 0) -> bool:
        """Would a sequence with a prompt of so many tokens exceed the queue? What has idle
        priority is in nobody else's way."""
        is_last = priority >= IDLE
        behind = [] if is_last else self._waiting.at(IDLE)
        running = self._in_flight.running if is_last else self._in_flight.urgent
        num_free = self.max_sequences - sum(sequence.num_slots for sequence in running)
        num_queued = self._in_flight.num_waiting - len(behind) - max(0, num_free)
        if num_queued < 0:
            return False
        num_waiting_tokens = self._in_flight.num_waiting_tokens - sum(sequence.num_prompt for sequence in behind)
        is_long = num_queued > 0 and num_waiting_tokens + num_tokens > self.max_queue_tokens
        return num_queued >= self.max_queue or is_long

    def seconds_to_serve(self) -> float:
        """About how long it takes until all that waits now has begun: its prompts, and the answers before it."""
        self._in_flight.steady.settle()
        running = self._in_flight.running
        prompts = self._in_flight.num_waiting_tokens + sum(s.num_new for s in running if s.num_new > 1)
        num_rows = self.max_sequences
        num_read = num_rows * sum(s.num_tokens for s in running) // max(1, len(running))
        plain = self.pace.predict(Shape(num_rows, num_rows, num_read, num_read))
        rounds = self._in_flight.num_waiting / self.max_sequences
        return self.pace.prices.token * prompts + rounds * self.pace.mean_output * plain

    def admit(self, work: Work) -> None:
        """Let those run whose turn it is. What they displace is no part of the step any more."""
        while self._waiting:
            sequence = self._waiting.first()
            if sequence.rank >= IDLE and self._in_flight.urgent:
                break
            match = self._make_room(work, sequence)
            if match is None:
                break
            if length := self._in_flight.fetching.begin(sequence, match, partial(self._fits, sequence, match)):
                self._waiting.admit(sequence, sequence.num_new - length)
                continue
            self._waiting.admit(sequence, sequence.num_new - match.length)
            self._memory.attach(sequence, match)
            self._in_flight.run(sequence)

    def _make_room(self, work: Work, sequence: Sequence) -> Match | None:
        """What the cache has for a sequence that fits now, running ones of a worse priority displaced if need be; None
        if it does not fit."""
        displaced = [other for other in reversed(self._in_flight.running) if other.rank > sequence.rank]
        free = self.max_sequences - self._in_flight.num_slots - sequence.num_slots
        if free + sum(other.num_slots for other in displaced) < 0:
            return None
        while True:
            if free >= 0:
                match = self._memory.match(sequence)
                if self._fits(sequence, match):
                    return match
            if not displaced:
                return None
            victim = displaced.pop(0)
            free += victim.num_slots
            self.preempt(work, victim)

    def _fits(self, sequence: Sequence, match: Match, length: int = 0) -> bool:
        prefills = [s for s in self._in_flight.running if s.num_new > 1]
        return self._memory.can_admit(sequence, match, prefills, length)

    def preempt(self, work: Work, sequence: Sequence) -> None:
        """Take a running sequence out of the step, and everything that it has."""
        work.chunks.pop(sequence, None)
        self._in_flight.stop(sequence)
        seconds = self.pace.chunk_seconds(0, sequence.num_computed)
        self.num_swapped += self._memory.save(sequence, seconds, self.pace.prices.byte)
        self._memory.release(sequence)
        if self._in_flight.draft_model is not None:
            self._in_flight.draft_model.forget(sequence)
        self._in_flight.wait_again(sequence)
        self.num_preempted += 1
