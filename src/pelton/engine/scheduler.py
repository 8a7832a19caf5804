"""Who runs in the next step and how many tokens each, who waits, who is preempted. Policy over ints: no tensors.

- Waiting sequences are admitted in the order of `waiting`: by priority, then fair among tenants, then by age, as long
  as their prompts fit into the KV memory that is left. A sequence displaces running ones of a worse priority.
- A step has one token budget. Sequences that decode come first, one token each, so that no prompt makes them wait;
  then their drafts, as far as there is memory for them without preempting anybody, and unless there are prompts, to
  which the time beside decodes belongs.
  Prefill chunks fill the rest, beside decodes only as far as the step is predicted to keep to the target (`pace`). A
  quarter of it is the oldest prefill's, so that it gets on whatever comes; what remains goes to the shortest first,
  so that a short prompt does not wait for the end of a huge one.
- What has idle priority gets steps of its own: while others run it keeps its blocks and stands still, and none of it
  is admitted. Its prompts are cut as beside streams, so that whoever comes waits for no long step.
- When blocks run out, the youngest sequence of the worst priority is preempted: it gives everything back, waits, and is
  computed again later (out of the prefix cache, if its blocks are still there), or copied to host memory and back
  where that is faster. Its output so far stays its output.
"""

from __future__ import annotations

import math
from array import array
from bisect import insort
from collections.abc import Mapping
from functools import partial

from pelton.engine.batch import num_drafted
from pelton.engine.draft_policy import Drafting
from pelton.engine.fairness import OUTPUT
from pelton.engine.fetching import Fetching
from pelton.engine.kv_memory import KVMemory, Match, namespace_of
from pelton.engine.pace import Pace, Shape
from pelton.engine.plain import PlainRun
from pelton.engine.sequence import Sequence
from pelton.engine.speculative import Speculation
from pelton.engine.tiers import DiskTier
from pelton.engine.waiting import WaitingQueue
from pelton.engine.work import Work
from pelton.ops.data import BLOCK_TOKENS
from pelton.request import IDLE

PROBE = 16
"""After so many steps with prefill there is one of decodes alone, so that it stays known what those cost, where the
target rests on that."""

MOST_BEHIND = 256
"""Steps after which sequences get what they have drawn, at the latest."""


def _goes_on(sequence: Sequence) -> bool:
    """Has it one token to compute, behind which the next one of its answer is drawn, as in the step before?"""
    is_alone = not sequence.children and sequence.group.beams is None
    return sequence.num_new == 1 and sequence.num_output > 0 and not sequence.draft and is_alone


class Scheduler:
    """The sequences of all requests in flight. `max_tokens` is the budget of a step, `max_sequences` how many run
    at once, a choice that is still to fork included; `max_queue` and `max_queue_tokens` bound what waits beyond
    those; `patience` is that of the `WaitingQueue`; `speculation` makes drafts, None: nobody does."""

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
        self.fetching = Fetching(tier, memory, pace)
        self.max_tokens = max_tokens
        self.max_sequences = max_sequences
        self.max_queue = max_queue
        self.max_queue_tokens = max_queue_tokens
        self.waiting = WaitingQueue(patience)
        self.running: list[Sequence] = []
        """The most urgent first, then the oldest."""
        self.speculation = speculation
        self.began = 0.0
        """When the step under way began, on the engine's clock."""
        self.draft_model = None if speculation is None else speculation.model
        self.num_preempted = self.num_swapped = self.num_drafted = self.num_accepted = 0
        self._num_mixed = 0
        """Steps with prefill since the last one without."""
        self._steady: Work | None = None
        """The last step's, while the next one can be the same."""

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

    def is_full(self, num_tokens: int, priority: int = 0) -> bool:
        """Would a sequence with a prompt of so many tokens exceed the queue? What has idle
        priority is in nobody else's way."""
        is_last = priority >= IDLE
        behind = [] if is_last else self.waiting.at(IDLE)
        running = self.running if is_last else self._urgent
        num_free = self.max_sequences - sum(sequence.num_slots for sequence in running)
        num_queued = self.num_waiting - len(behind) - max(0, num_free)
        if num_queued < 0:
            return False
        num_waiting_tokens = self.num_waiting_tokens - sum(sequence.num_prompt for sequence in behind)
        is_long = num_queued > 0 and num_waiting_tokens + num_tokens > self.max_queue_tokens
        return num_queued >= self.max_queue or is_long

    @property
    def _urgent(self) -> list[Sequence]:
        """Those of `running` that have no idle priority."""
        if not self.running or self.running[-1].rank < IDLE:
            return self.running
        return [sequence for sequence in self.running if sequence.rank < IDLE]

    def seconds_to_serve(self) -> float:
        """About how long it takes until all that waits now has begun: its prompts, and the answers before it."""
        self.settle()
        prompts = self.num_waiting_tokens + sum(s.num_new for s in self.running if s.num_new > 1)
        num_rows = self.max_sequences
        num_read = num_rows * sum(s.num_tokens for s in self.running) // max(1, len(self.running))
        plain = self.pace.predict(Shape(num_rows, num_rows, num_read, num_read))
        rounds = self.num_waiting / self.max_sequences
        return self.pace.prices.token * prompts + rounds * self.pace.mean_output * plain

    def _num_slots(self) -> int:
        return sum(sequence.num_slots for sequence in self.running)

    def add(self, sequence: Sequence) -> None:
        """A new sequence waits. It is the youngest."""
        self._end_steady()
        self.waiting.add(sequence)

    def schedule(self) -> Work:
        """Pick the next step's work and give it the blocks that it needs."""
        if (steady := self._steady) is not None and self._can_repeat(steady):
            steady.repeat()
            return self._drafted(steady, asked) if (asked := self._asked(steady)) else steady
        self._end_steady()
        work = Work()
        self._admit(work)
        awake = self._urgent or self.running
        prefills = self._give_decodes(work, awake)
        if awake is not self.running and not work.chunks and not prefills:
            awake = self.running  # the others wait for something else than a step
            prefills = self._give_decodes(work, awake)
        self._num_mixed += 1
        if not prefills or (work.chunks and not self.pace.target and self._num_mixed > PROBE):
            self._num_mixed = 0
        else:
            self._give_prefills(work, prefills)
        if self.running and not work.chunks:
            self._make_way()
        if work.chunks and not prefills and (asked := self._asked(work)):
            self._give_drafts(work, asked)
        work.moves, self.memory.moves = self.memory.moves, []
        work.num_bytes = self.memory.num_bytes(work.moves)
        is_alone = not work.moves and work.drafting is None and not self.waiting
        # One that stands still for want of memory is to be looked at again in each step.
        is_complete = 0 < len(work.chunks) == len(awake)
        work.is_steady = is_alone and is_complete and all(map(_goes_on, awake))
        self._steady = work if work.is_steady else None
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

    def _can_repeat(self, work: Work) -> bool:
        """Is the next step the same as the last one, which was `work`? Then its sequences have the blocks for it."""
        if work.retabled:
            sequences = list(work.chunks)
            for sequence in (sequences[place] for place in work.retabled):
                if not self.memory.has_place(sequence, 1):
                    if self.memory.room(sequence) < 1:
                        return False
                    self.memory.grow(sequence, 1)
        return True

    def settle(self) -> None:
        """Give sequences the tokens that they have drawn in steps that did not look at them."""
        work = self._steady
        if work is None or work.plain is None or not work.plain.num_behind:
            return
        self._count(work, work.plain.num_behind)
        work.plain.settle_all()

    def _count(self, work: Work, num_steps: int) -> None:
        """So many steady steps were computed."""
        self.waiting.num_computed += num_steps * len(work.chunks)
        for tenant, num_tokens in work.tenants.items():
            self.waiting.shares.charge(tenant, OUTPUT * num_steps * num_tokens)

    def _end_steady(self) -> None:
        """The next step is not the last one again."""
        self.settle()
        self._steady = None

    def _asked(self, work: Work) -> Speculation | None:
        """Who is to be asked for drafts for a step of sequences that decode; None: nobody."""
        is_idle = self.speculation is None or self.speculation.rests(len(work.chunks))
        return None if is_idle else self.speculation

    def _drafted(self, steady: Work, speculation: Speculation) -> Work:
        """A steady step, with drafts where it is to have any; then it is steady no more."""
        self.settle()
        work = Work(dict(steady.chunks))
        self._give_drafts(work, speculation)
        if work.chunks == steady.chunks and work.drafting is None:
            return steady
        self._steady = None
        return work

    def _make_way(self) -> None:
        """Nobody can go on: take the blocks of a slot that has its candidates, and so holds what others of its search
        need to get theirs."""
        if (sequence := next((each for each in reversed(self.running) if not each.num_new), None)) is not None:
            self.park(sequence)

    def _give_drafts(self, work: Work, speculation: Speculation) -> None:
        """Let sequences that decode try drafts."""
        spare = self.max_tokens - len(work.chunks)
        work.drafting = speculation.draft(work.shape, work.chunks, spare)
        for sequence in work.chunks:
            if sequence.draft:
                num_drafted = min(len(sequence.draft), spare, self.memory.room(sequence) - 1)
                del sequence.draft[num_drafted:]
                self.memory.grow(sequence, 1 + num_drafted)
                work.chunks[sequence] += num_drafted
                spare -= num_drafted
        if work.drafting is not None and not self._give_depths(work.drafting, spare):
            work.drafting = None

    def _give_depths(self, drafting: Drafting, spare: int) -> bool:
        """Room for the drafts that the draft model is to make. False: nothing is left for it to do."""
        for sequence, depth in list(drafting.depths.items()):
            depth = min(depth, spare, self.memory.room(sequence) - 1)
            if depth > 0:
                drafting.depths[sequence] = depth
                self.memory.grow(sequence, 1 + depth)
                spare -= depth
            else:
                del drafting.depths[sequence], drafting.chunks[sequence]
        return bool(drafting.chunks)

    def _give_prefills(self, work: Work, prefills: list[Sequence]) -> None:
        tokens, seconds = self.max_tokens - sum(work.chunks.values()), self._spare_seconds(work)
        oldest = min(prefills, key=lambda s: s.age)
        kept_tokens = min(oldest.num_new, -(-tokens // 4))
        kept_seconds = min(seconds / 4, self.pace.chunk_seconds(oldest.num_computed, oldest.num_new, oldest.is_scored))
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

    def _spare_seconds(self, work: Work) -> float:
        """What prefills may add to the time of a step with these decodes."""
        if not work.chunks and self._urgent:
            return math.inf
        return self.pace.spare(work.shape, self.memory.num_bytes(self.memory.moves))

    def _extend_match(self, sequence: Sequence) -> None:
        """Use what other sequences have published between a sequence's admission and its first step."""
        if sequence.num_computed == sequence.num_cached and sequence.state == "running":
            match = self.memory.match(sequence)
            if match.length > sequence.num_computed and self.memory.can_admit(sequence, match, ()):
                self.memory.release(sequence)
                self.memory.attach(sequence, match)

    def _admit(self, work: Work) -> None:
        while self.waiting:
            sequence = self.waiting.first()
            if sequence.rank >= IDLE and self._urgent:
                break
            match = self._make_room(work, sequence)
            if match is None:
                break
            if length := self.fetching.begin(sequence, match, partial(self._fits, sequence, match)):
                self.waiting.admit(sequence, sequence.num_new - length)
                continue
            self.waiting.admit(sequence, sequence.num_new - match.length)
            self.memory.attach(sequence, match)
            self._run(sequence)

    def take_fetched(self) -> None:
        """Let sequences go on whose beginnings have come from the disk."""
        for sequence in self.fetching.take():
            self._wait_again(sequence)

    def _make_room(self, work: Work, sequence: Sequence) -> Match | None:
        """What the cache has for a sequence that fits now, running ones of a worse priority displaced if need be; None
        if it does not fit."""
        displaced = [other for other in reversed(self.running) if other.rank > sequence.rank]
        free = self.max_sequences - self._num_slots() - sequence.num_slots
        if free + sum(other.num_slots for other in displaced) < 0:
            return None
        while True:
            if free >= 0:
                match = self.memory.match(sequence)
                if self._fits(sequence, match):
                    return match
            if not displaced:
                return None
            victim = displaced.pop(0)
            free += victim.num_slots
            self._preempt(work, victim)

    def _fits(self, sequence: Sequence, match: Match, length: int = 0) -> bool:
        return self.memory.can_admit(sequence, match, [s for s in self.running if s.num_new > 1], length)

    def _run(self, sequence: Sequence) -> None:
        sequence.state = "running"
        self._end_steady()
        insort(self.running, sequence, key=lambda s: s.order)

    def _stop(self, sequence: Sequence) -> None:
        self._end_steady()
        self.running.remove(sequence)

    def _give_chunk(self, work: Work, sequence: Sequence, num_tokens: int) -> None:
        """Put a sequence into the step with as many of these tokens as there is memory for, preempting those behind it
        if need be. A sequence that gets no memory keeps its blocks and stands still."""
        if sequence.state != "running":
            return
        if self.memory.has_place(sequence, num_tokens):
            work.chunks[sequence] = num_tokens
            return
        while (room := self.memory.room(sequence)) < num_tokens:
            last = self.running[-1]
            if last is sequence:
                break
            self._preempt(work, last)
        if (num_tokens := min(num_tokens, room)) > 0:
            self.memory.grow(sequence, num_tokens)
            work.chunks[sequence] = num_tokens

    def _preempt(self, work: Work, sequence: Sequence) -> None:
        work.chunks.pop(sequence, None)
        self._stop(sequence)
        seconds = self.pace.chunk_seconds(0, sequence.num_computed)
        self.num_swapped += self.memory.save(sequence, seconds, self.pace.prices.byte)
        self.memory.release(sequence)
        if self.draft_model is not None:
            self.draft_model.forget(sequence)
        self._wait_again(sequence)
        self.num_preempted += 1

    def _wait_again(self, sequence: Sequence) -> None:
        self._end_steady()
        sequence.state = "waiting"
        self.waiting.put_back(sequence)

    def commit(self, work: Work, accepted: Mapping[Sequence, int]) -> None:
        """The step has run: its tokens are in memory. Of drafts, `accepted` tokens become their sequence's own and the
        others are forgotten. Choices whose prompt is complete fork."""
        if work.is_steady:
            self._commit_steady(work)
            return
        for sequence, num_tokens in work.chunks.items():
            was_prefill, kept = sequence.num_new > 1, 0
            if sequence.draft:
                kept = accepted.get(sequence, 0)
                drafted = num_drafted(sequence, num_tokens)
                self.num_drafted += drafted
                self.num_accepted += kept
                if self.draft_model is not None:
                    self.draft_model.tell(sequence, kept)
                num_tokens -= drafted - kept
                sequence.tokens += sequence.draft[:kept]
                sequence.draft = array("i")
            if sequence.group.num_cached is None:
                sequence.group.num_cached = sequence.num_cached
                sequence.group.started_at = self.began
            self.memory.commit(sequence, num_tokens)
            self.waiting.num_computed += num_tokens
            if sequence.num_computed < len(sequence.tokens):
                continue
            if sequence.group.pool is None:
                self.waiting.shares.charge(sequence.group.tenant, OUTPUT * (sequence.num_slots + kept))
            if was_prefill:
                self.memory.publish_tail(sequence)
            if not sequence.num_output:
                self._offer(sequence)
            if sequence.children:
                self._fork(sequence)

    def _commit_steady(self, work: Work) -> None:
        """What `commit` comes to for a steady step."""
        work.retabled = []
        for place, sequence in enumerate(work.chunks):
            if (sequence.num_computed + 1) % BLOCK_TOKENS in self.memory.phases:
                self.memory.commit(sequence, 1)
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
            self.memory.commit(sequence, 1)
        if plain.num_behind == MOST_BEHIND:
            self.settle()

    def _offer(self, sequence: Sequence) -> None:
        """Have a prompt that is complete kept on disk. A text that is embedded hardly begins another one."""
        tier = self.fetching.tier
        if tier is not None and sequence.node is not None and sequence.group.pool is None:
            tokens = sequence.tokens[: sequence.node.depth * BLOCK_TOKENS]
            num_shared = sequence.node.depth if sequence.group.request.pin_ttl else sequence.num_cached // BLOCK_TOKENS
            tier.offer(namespace_of(sequence), tokens, sequence.node, num_shared)

    def _fork(self, sequence: Sequence) -> None:
        children, sequence.children = sequence.children, []
        for child in children:
            child.rank = sequence.rank
            if self.memory.fork(sequence, child):
                self._run(child)
            else:
                self._wait_again(child)

    def park(self, sequence: Sequence) -> None:
        """Take the place and the blocks of a sequence of a beam search; its tokens stay."""
        if sequence.state == "running":
            self._stop(sequence)
            self.memory.release(sequence)
        elif sequence.state == "waiting":
            self.waiting.remove(sequence)
            self.memory.forget_saved(sequence)
        sequence.state = "parked"

    def refork(self, parent: Sequence, child: Sequence) -> None:
        """Make a sequence of a beam search a copy of another one, by sharing blocks where there are a place and memory
        for it now."""
        self.park(child)
        child.tokens, child.rank = parent.tokens[:], parent.rank
        is_placed = parent.state == "running" and self._num_slots() < self.max_sequences
        if is_placed and self.memory.fork(parent, child):
            self._run(child)
        else:
            self._wait_again(child)

    def unpark(self, sequence: Sequence) -> None:
        """A parked sequence has more to compute again."""
        if sequence.state == "parked":
            self._wait_again(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, whatever its state, and give its blocks back. What it had is left in the cache."""
        self._end_steady()
        if sequence.state == "running":
            self._stop(sequence)
            if sequence.children:
                self._hand_over(sequence)
            else:
                self.memory.publish_tail(sequence)
                self.memory.release(sequence)
        elif sequence.state == "waiting":
            self.waiting.remove(sequence)
            if sequence.children:
                heir = self._promote(sequence)
                heir.saved, sequence.saved = sequence.saved, None
                self._wait_again(heir)
            self.memory.forget_saved(sequence)
        elif sequence.state == "loading":
            self.fetching.leave(sequence, self._promote(sequence) if sequence.children else None)
        elif sequence.state == "compiling":
            if sequence.children:
                self._promote(sequence).state = "compiling"
        elif sequence.state == "forking":
            sequence.group.parent_of(sequence).children.remove(sequence)
        if self.draft_model is not None:
            self.draft_model.finish(sequence)
        self.pace.ended(sequence.num_output)
        sequence.state = "finished"

    def _promote(self, sequence: Sequence) -> Sequence:
        """The first of the choices that would fork from a sequence takes its place."""
        heir, *others = sequence.children
        heir.children, sequence.children = others, []
        heir.rank = sequence.rank
        return heir

    def _hand_over(self, sequence: Sequence) -> None:
        heir = self._promote(sequence)
        heir.tables, heir.node = sequence.tables, sequence.node
        heir.num_computed, heir.num_cached = sequence.num_computed, sequence.num_cached
        sequence.tables, sequence.node, sequence.num_computed = (), None, 0
        self._run(heir)

    def check(self) -> None:
        """Raise `InternalError` unless every block is accounted for."""
        self.settle()
        self.memory.check([*self.running, *self.waiting, *self.fetching.sequences])
        if self.draft_model is not None:
            self.draft_model.shadows.check(self.running)
