"""Who runs in the next step and how many tokens each, who waits, who is preempted. Policy over ints: no tensors.

- Waiting sequences are admitted oldest first, as long as their prompts fit into the KV memory that is left.
- A step has one token budget. Sequences that decode come first, one token each, so that no prompt makes them wait;
  then their drafts, as far as there is memory for them without preempting anybody.
  Prefill chunks fill the rest, beside decodes only as far as the step is predicted to keep to the target (`pace`). A
  quarter of it is the oldest prefill's, so that it gets on whatever comes; what remains goes to the shortest first,
  so that a short prompt does not wait for the end of a huge one.
- When blocks run out, the youngest sequence is preempted: it gives everything back, waits, and is computed again
  later (out of the prefix cache, if its blocks are still there). Its output so far stays its output.
"""

from __future__ import annotations

import math
from array import array
from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass, field

from pelton.engine.batch import num_drafted
from pelton.engine.kv_memory import Copy, KVMemory
from pelton.engine.pace import Pace, Shape, num_pairs
from pelton.engine.sequence import Sequence


@dataclass
class Work:
    """One step: sequences with the number of tokens to compute for each, those of its draft included, after these
    copies of blocks."""

    chunks: dict[Sequence, int] = field(default_factory=dict)
    copies: list[Copy] = field(default_factory=list)

    @property
    def shape(self) -> Shape:
        """What its time depends on, until it is committed."""
        tokens = rows = read = pairs = 0  # a step has many sequences: no object for each
        for sequence, num_tokens in self.chunks.items():
            start = sequence.num_computed
            behind = start + num_tokens - len(sequence.tokens)
            if behind >= 0:
                rows += sequence.num_slots + behind
            tokens += num_tokens
            read += start + num_tokens
            pairs += num_pairs(start, num_tokens)
        return Shape(tokens, rows, read, pairs)


class Scheduler:
    """The sequences of all requests in flight. `max_tokens` is the budget of a step, `max_sequences` how many run
    at once, a choice that is still to fork included; `max_queue` bounds what waits beyond those."""

    def __init__(self, memory: KVMemory, pace: Pace, *, max_tokens: int, max_sequences: int, max_queue: int) -> None:
        self.memory = memory
        self.pace = pace
        self.max_tokens = max_tokens
        self.max_sequences = max_sequences
        self.max_queue = max_queue
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        """Both oldest first."""
        self.num_preempted = 0

    @property
    def has_work(self) -> bool:
        """Is there anything to schedule?"""
        return bool(self.running or self.waiting)

    @property
    def is_full(self) -> bool:
        """Would one more sequence exceed the queue?"""
        return len(self.waiting) >= self.max_queue + self.max_sequences - self._num_slots()

    def _num_slots(self) -> int:
        return sum(sequence.num_slots for sequence in self.running)

    def add(self, sequence: Sequence) -> None:
        """A new sequence waits. It is the youngest."""
        self.waiting.append(sequence)

    def schedule(self) -> Work:
        """Pick the next step's work and give it the blocks that it needs."""
        self._admit()
        work = Work()
        prefills: list[Sequence] = []
        for sequence in list(self.running):
            if sequence.num_new > 1 or sequence.children:
                prefills.append(sequence)
            elif len(work.chunks) < self.max_tokens:
                self._give_chunk(work, sequence, 1)
        self._give_drafts(work)
        if prefills:
            self._give_prefills(work, prefills)
        work.copies, self.memory.copies = self.memory.copies, []
        return work

    def _give_drafts(self, work: Work) -> None:
        """Let sequences that decode try their drafts."""
        spare = self.max_tokens - len(work.chunks)
        for sequence in work.chunks:
            if sequence.draft:
                num_drafted = min(len(sequence.draft), spare, self.memory.room(sequence) - 1)
                self.memory.grow(sequence, 1 + num_drafted)
                work.chunks[sequence] += num_drafted
                spare -= num_drafted

    def _give_prefills(self, work: Work, prefills: list[Sequence]) -> None:
        tokens, seconds = self.max_tokens - sum(work.chunks.values()), self._spare_seconds(work)
        oldest = prefills[0]
        kept_tokens = min(oldest.num_new, -(-tokens // 4))
        kept_seconds = min(seconds / 4, self.pace.chunk_seconds(oldest.num_computed, oldest.num_new))
        for sequence in sorted(prefills, key=lambda s: s.num_new):
            self._extend_match(sequence)
            if sequence is oldest:
                kept_tokens, kept_seconds = 0, 0.0
            start = sequence.num_computed
            within = self.pace.chunk_within(seconds - kept_seconds, start)
            num_tokens = min(sequence.num_new, tokens - kept_tokens, max(within, sequence is oldest))
            if num_tokens > 0:
                self._give_chunk(work, sequence, num_tokens)
                given = work.chunks.get(sequence, 0)
                tokens -= given
                seconds -= self.pace.chunk_seconds(start, given)

    def _spare_seconds(self, work: Work) -> float:
        """What prefills may add to the time of a step with these decodes."""
        if not work.chunks:
            return math.inf
        plain = self.pace.predict(work.shape)
        return self.pace.limit(plain) - plain

    def _extend_match(self, sequence: Sequence) -> None:
        """Use what other sequences have published between a sequence's admission and its first step."""
        if sequence.num_computed == sequence.num_cached and sequence.state == "running":
            match = self.memory.match(sequence)
            if match.length > sequence.num_computed and self.memory.can_admit(sequence, match, ()):
                self.memory.release(sequence)
                self.memory.attach(sequence, match)

    def _admit(self) -> None:
        if not self.waiting:
            return
        num_slots = self._num_slots()
        prefills = [sequence for sequence in self.running if sequence.num_new > 1]
        while self.waiting and num_slots + self.waiting[0].num_slots <= self.max_sequences:
            sequence = self.waiting[0]
            match = self.memory.match(sequence)
            if not self.memory.can_admit(sequence, match, prefills):
                break
            self.memory.attach(sequence, match)
            del self.waiting[0]
            sequence.state = "running"
            insort(self.running, sequence, key=lambda s: s.order)
            prefills.append(sequence)
            num_slots += sequence.num_slots

    def _give_chunk(self, work: Work, sequence: Sequence, num_tokens: int) -> None:
        """Put a sequence into the step with as many of these tokens as there is memory for, preempting younger ones
        if need be. A sequence that gets no memory keeps its blocks and stands still."""
        if sequence.state != "running":
            return
        if self.memory.has_place(sequence, num_tokens):
            work.chunks[sequence] = num_tokens
            return
        while (room := self.memory.room(sequence)) < num_tokens:
            youngest = self.running[-1]
            if youngest is sequence:
                break
            self._preempt(work, youngest)
        if (num_tokens := min(num_tokens, room)) > 0:
            self.memory.grow(sequence, num_tokens)
            work.chunks[sequence] = num_tokens

    def _preempt(self, work: Work, sequence: Sequence) -> None:
        work.chunks.pop(sequence, None)
        self.running.remove(sequence)
        self.memory.release(sequence)
        self._wait_again(sequence)
        self.num_preempted += 1

    def _wait_again(self, sequence: Sequence) -> None:
        sequence.state = "waiting"
        insort(self.waiting, sequence, key=lambda s: s.order)

    def commit(self, work: Work, accepted: Mapping[Sequence, int]) -> None:
        """The step has run: its tokens are in memory. Of drafts, `accepted` tokens become their sequence's own and the
        others are forgotten. Choices whose prompt is complete fork."""
        for sequence, num_tokens in work.chunks.items():
            was_prefill = sequence.num_new > 1
            if drafted := num_drafted(sequence, num_tokens):
                kept = accepted[sequence]
                sequence.tokens += sequence.draft[:kept]
                num_tokens -= drafted - kept
            sequence.draft = array("i")
            if sequence.group.num_cached is None:
                sequence.group.num_cached = sequence.num_cached
            self.memory.commit(sequence, num_tokens)
            if was_prefill and not sequence.num_new:
                self.memory.publish_tail(sequence)
            if sequence.children and not sequence.num_new:
                self._fork(sequence)

    def _fork(self, sequence: Sequence) -> None:
        children, sequence.children = sequence.children, []
        for child in children:
            if self.memory.fork(sequence, child):
                child.state = "running"
                insort(self.running, child, key=lambda s: s.order)
            else:
                self._wait_again(child)

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, whatever its state, and give its blocks back. What it had is left in the cache."""
        if sequence.state == "running":
            self.running.remove(sequence)
            if sequence.children:
                self._hand_over(sequence)
            else:
                self.memory.publish_tail(sequence)
                self.memory.release(sequence)
        elif sequence.state == "waiting":
            self.waiting.remove(sequence)
            if sequence.children:
                heir = self._promote(sequence)
                self._wait_again(heir)
        elif sequence.state == "forking":
            sequence.group.parent_of(sequence).children.remove(sequence)
        sequence.state = "finished"

    def _promote(self, sequence: Sequence) -> Sequence:
        """The first of the choices that would fork from a sequence takes its place."""
        heir, *others = sequence.children
        heir.children, sequence.children = others, []
        return heir

    def _hand_over(self, sequence: Sequence) -> None:
        heir = self._promote(sequence)
        heir.tables, heir.node = sequence.tables, sequence.node
        heir.num_computed, heir.num_cached = sequence.num_computed, sequence.num_cached
        sequence.tables, sequence.node, sequence.num_computed = (), None, 0
        heir.state = "running"
        insort(self.running, heir, key=lambda s: s.order)

    def check(self) -> None:
        """Raise `InternalError` unless every block is accounted for."""
        self.memory.check(self.running)
