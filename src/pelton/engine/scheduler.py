"""What the next step computes: which sequences, and how many tokens of each. Policy over ints: no tensors.

- Who takes part at all is decided first (`admission`).
- A step has one token budget. Sequences that decode come first, one token each, so that no prompt makes them wait;
  then their drafts, as far as there is memory for them without preempting anybody, and unless there are prompts, to
  which the time beside decodes belongs.
  Prefill chunks fill the rest, beside decodes only as far as the step is predicted to keep to the target (`pace`). A
  quarter of it is the oldest prefill's, so that it gets on whatever comes; what remains goes to the shortest first,
  so that a short prompt does not wait for the end of a huge one.
- What has idle priority gets steps of its own: while others run it keeps its blocks and stands still. Its prompts are
  cut as beside streams, so that whoever comes waits for no long step.
- When blocks run out, the youngest sequence of the worst priority is preempted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from pelton.engine.admission import Admission
from pelton.engine.fairness import OUTPUT
from pelton.engine.forks import Forks
from pelton.engine.in_flight import InFlight
from pelton.engine.kv_memory import KVMemory, namespace_of
from pelton.engine.pace import Pace
from pelton.engine.sequence import Sequence
from pelton.engine.speculative import Speculation
from pelton.engine.steady import goes_on
from pelton.engine.step_drafts import StepDrafts
from pelton.engine.tiers import DiskTier
from pelton.engine.work import Work
from pelton.ops.data import BLOCK_TOKENS
from pelton.request import IDLE

PROBE = 16
"""After so many steps with prefill there is one of decodes alone, so that it stays known what those cost, where the
target rests on that."""


class Scheduler:
    """Makes the steps of all requests `in_flight`. `max_tokens` is the budget of a step; `max_sequences`, `max_queue`
    and `max_queue_tokens` are those of `Admission`, `patience` that of the `WaitingQueue`; `speculation` makes drafts,
    None: nobody does."""

    def __init__(
        self,
        memory: KVMemory,
        pace: Pace,
        *,
        max_tokens: int,
        max_sequences: int,
        max_queue: int,
        max_queue_tokens: int = 1 << 62,
        patience: int = 1 << 62,
        tier: DiskTier | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        self.memory = memory
        self.pace = pace
        self.max_tokens = max_tokens
        draft_model = None if speculation is None else speculation.model
        self.in_flight = InFlight(memory, pace, tier, draft_model, patience=patience)
        self.steady = self.in_flight.steady
        self.forks = Forks(self.in_flight, max_sequences)
        self.admission = Admission(
            self.in_flight,
            pace,
            max_sequences=max_sequences,
            max_queue=max_queue,
            max_queue_tokens=max_queue_tokens,
        )
        self.drafts = StepDrafts(memory, speculation, max_tokens)
        self.began = 0.0
        """When the step under way began, on the engine's clock."""
        self._num_mixed = 0
        """Steps with prefill since the last one without."""

    def schedule(self) -> Work:
        """Pick the next step's work and give it the blocks that it needs."""
        if (steady := self.steady.next()) is not None:
            return self._drafted(steady, asked) if (asked := self.drafts.asked(steady)) else steady
        self.steady.end()
        work = Work()
        self.admission.admit(work)
        running = self.in_flight.running
        awake = self.in_flight.urgent or running
        prefills = self._give_decodes(work, awake)
        if awake is not running and not work.chunks and not prefills:
            awake = running  # the others wait for something else than a step
            prefills = self._give_decodes(work, awake)
        self._num_mixed += 1
        if not prefills or (work.chunks and not self.pace.target and self._num_mixed > PROBE):
            self._num_mixed = 0
        else:
            self._give_prefills(work, prefills)
        if running and not work.chunks:
            self._make_way()
        if work.chunks and not prefills and (asked := self.drafts.asked(work)):
            self.drafts.give(work, asked)
        work.moves, self.memory.moves = self.memory.moves, []
        work.num_bytes = self.memory.num_bytes(work.moves)
        is_alone = not work.moves and work.drafting is None and not self.in_flight.waiting
        # One that stands still for want of memory is to be looked at again in each step.
        is_complete = 0 < len(work.chunks) == len(awake)
        work.is_steady = is_alone and is_complete and all(map(goes_on, awake))
        if work.is_steady:
            self.steady.begin(work)
        return work

    def _drafted(self, steady: Work, speculation: Speculation) -> Work:
        """A steady step, with drafts where it is to have any; then it is steady no more."""
        self.steady.settle()
        work = Work(dict(steady.chunks))
        self.drafts.give(work, speculation)
        if work.chunks == steady.chunks and work.drafting is None:
            return steady
        self.steady.end()
        return work

    def _give_decodes(self, work: Work, awake: list[Sequence]) -> list[Sequence]:
        """Put those into the step that have one token to compute; the others are returned."""
        prefills: list[Sequence] = []
        for sequence in list(awake):
            num_new = sequence.num_new
            if sequence.children or num_new > 1:
                prefills.append(sequence)
            elif num_new and len(work.chunks) < self.max_tokens:
                self._give_chunk(work, sequence, 1)
        return prefills

    def _give_prefills(self, work: Work, prefills: list[Sequence]) -> None:
        tokens, seconds = self.max_tokens - sum(work.chunks.values()), self._spare_seconds(work, prefills)
        oldest = min(prefills, key=lambda s: s.age)
        kept_tokens = min(oldest.num_new, -(-tokens // 4))
        one, whole = (
            self.pace.chunk_seconds(oldest.num_computed, count, oldest.is_scored) for count in (1, oldest.num_new)
        )
        kept_seconds = min(max(seconds / 4, one), whole)
        for sequence in sorted(prefills, key=lambda s: (s.rank, s.num_new)):
            self._extend_match(sequence)
            if sequence is oldest:
                kept_tokens, kept_seconds = 0, 0.0
            start = sequence.num_computed
            within = self.pace.chunk_within(seconds - kept_seconds, start, sequence.is_scored)
            num_tokens = min(sequence.num_new, tokens - kept_tokens, max(within, sequence is oldest))
            if num_tokens > 0:
                self._give_chunk(work, sequence, num_tokens)
                given = work.chunks.get(sequence, 0)
                tokens -= given
                seconds -= self.pace.chunk_seconds(start, given, sequence.is_scored)

    def _spare_seconds(self, work: Work, prefills: list[Sequence]) -> float:
        """What these prefills, all of idle priority or none, may add to the time of a step with these decodes."""
        if not work.chunks and prefills[0].rank < IDLE:
            return math.inf
        num_joining = sum(map(_num_streams, prefills)) if work.chunks else 0
        return self.pace.spare(work.shape, self.memory.num_bytes(self.memory.moves), num_joining)

    def _extend_match(self, sequence: Sequence) -> None:
        """Use what other sequences have published between a sequence's admission and its first step."""
        if sequence.num_computed == sequence.num_cached and sequence.state == "running":
            match = self.memory.match(sequence)
            if match.length > sequence.num_computed and self.memory.can_admit(sequence, match, ()):
                self.memory.release(sequence)
                self.memory.attach(sequence, match)

    def _give_chunk(self, work: Work, sequence: Sequence, num_tokens: int) -> None:
        """Put a sequence into the step with as many of these tokens as there is memory for, preempting those behind it
        if need be. A sequence that gets no memory keeps its blocks and stands still."""
        if sequence.state != "running":
            return
        if self.memory.has_place(sequence, num_tokens):
            work.chunks[sequence] = num_tokens
            return
        while (room := self.memory.room(sequence)) < num_tokens:
            last = self.in_flight.running[-1]
            if last is sequence:
                break
            self.admission.preempt(work, last)
        if (num_tokens := min(num_tokens, room)) > 0:
            self.memory.grow(sequence, num_tokens)
            work.chunks[sequence] = num_tokens

    def _make_way(self) -> None:
        """Nobody can go on: take the blocks of a slot that has its candidates, and so holds what others of its search
        need to get theirs."""
        idle = (each for each in reversed(self.in_flight.running) if not each.num_new)
        if (sequence := next(idle, None)) is not None:
            self.forks.park(sequence)

    def commit(self, work: Work, accepted: Mapping[Sequence, int]) -> None:
        """The step has run: its tokens are in memory. Of drafts, `accepted` tokens become their sequence's own and the
        others are forgotten. Choices whose prompt is complete fork."""
        if work.is_steady:
            self.steady.commit(work)
            return
        waiting = self.in_flight.waiting
        for sequence, num_tokens in work.chunks.items():
            was_prefill, kept = sequence.num_new > 1, 0
            if sequence.draft:
                kept = accepted.get(sequence, 0)
                num_tokens = self.drafts.keep(sequence, num_tokens, kept)
            if sequence.group.num_cached is None:
                sequence.group.num_cached = sequence.num_cached
                sequence.group.started_at = self.began
            self.memory.commit(sequence, num_tokens)
            waiting.num_computed += num_tokens
            if sequence.num_computed < len(sequence.tokens):
                continue
            if sequence.group.pool is None:
                waiting.shares.charge(sequence.group.tenant, OUTPUT * (sequence.num_slots + kept))
            if was_prefill:
                self.memory.publish_tail(sequence)
            if not sequence.num_output:
                self._offer(sequence)
            if sequence.children:
                self.forks.fork(sequence)

    def _offer(self, sequence: Sequence) -> None:
        """Have a prompt that is complete kept on disk. A text that is embedded hardly begins another one."""
        tier = self.in_flight.fetching.tier
        if tier is not None and sequence.node is not None and sequence.group.pool is None:
            tokens = sequence.tokens[: sequence.node.depth * BLOCK_TOKENS]
            num_shared = sequence.node.depth if sequence.group.request.pin_ttl else sequence.num_cached // BLOCK_TOKENS
            tier.offer(namespace_of(sequence), tokens, sequence.node, num_shared)


def _num_streams(prefill: Sequence) -> int:
    """How many streams will decode when it is complete."""
    num_left = (prefill.group.request.sampling.max_tokens or 0) - prefill.num_output
    return prefill.num_slots if num_left > 1 else 0
