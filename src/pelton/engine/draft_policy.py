"""When the draft model drafts, for which sequences and how far, and when it reads what it has missed.

It is asked for what lookup does not offer better. A step with its drafts is predicted as a whole: its own runs, one per
token of the longest draft, and the target's step with the rows to verify. What brings the most tokens per second wins,
plain decoding included. While it drafts, each further token must still bring more than its time is worth; how sure
the draft model was of those before tells how likely they are right.

A sequence that the draft model has not followed has to be read first, its prompt above all: in chunks beside the steps,
and only where what is left of the answer is expected to earn that back. So a model whose drafts do not pay never
computes a prompt twice.

What is not known yet has to be tried. All that is spent without being sure of it comes out of a purse, in seconds:
a little at the beginning, a small share of the time of every step, and what drafts have won. When it is empty, steps
are plain.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from pelton.engine.draft_costs import Candidate, DraftCosts
from pelton.engine.draft_guesses import DraftGuesses
from pelton.engine.drafting import LEAST_GAIN, PAST, Drafting, Plan, with_rows
from pelton.engine.pace import Pace, Shape
from pelton.engine.sequence import Sequence
from pelton.engine.shadows import Shadows

MAX_DEPTH = 8
"""Tokens of a draft."""
MARGIN = 2.5
"""How many times the reading of a text must be expected to be earned back."""
ALLOWANCE, EARNED, MOST = 16.0, 0.02, 48.0
"""The purse: plain steps that it starts with, share of each step that is added, plain steps that it holds at most."""
OUTLIER = 4.0
"""A step counts for so many times what was expected of it at most."""
REMINDER = 24
"""After so many steps with drafts there is one without, so that it stays known what that takes."""
PROBE_DEPTH, PROBE_STEPS = 2, 8
"""A trial: so many steps with drafts of so many tokens."""
AGAIN = 3.0
"""How many times what a trial takes must be in the purse, where it is not the first."""
FIRST_WAIT, LAST_WAIT = 32, 1024
"""Steps from one trial to the next, which double."""


class DraftPolicy:
    """Decisions for one draft model. `pace`: of the target's steps. `weight`: the draft model's size as a share of the
    target's, from which its speed is guessed until it is measured. `max_tokens`: of a run."""

    def __init__(self, pace: Pace, shadows: Shadows, *, weight: float, max_tokens: int) -> None:
        self.shadows = shadows
        self.costs = DraftCosts(pace, weight, max_tokens)
        self.guesses = DraftGuesses()
        self.num_drafted = self.num_accepted = 0
        self._pace = pace
        self._max_tokens = max_tokens
        self._drafts: dict[Sequence, list[int]] = {}
        """How sure the draft model was of each token of the drafts that are tried in this step."""
        self._purse: float | None = None
        self._spent = 0.0
        """Seconds that this step takes more for its drafts."""
        self._shape: Shape | None = None
        """What the step under way would do without drafts."""
        self._plains: dict[int, float] = {}
        """Seconds of steps without drafts, by their number of tokens."""
        self._has_drafts = False
        """Did the draft model make drafts for it?"""
        self._since_plain = 0
        self._token_seconds = 0.0
        """What an accepted token saves."""
        self._trials = 0
        """Steps that are left of a trial."""
        self._until_trial, self._wait = 0, FIRST_WAIT

    # what is decided before a step

    def plan(self, shape: Shape, sequences: Iterable[Sequence], lookups: Plan, spare: int) -> Drafting | None:
        """The draft model's part of a step that does `shape` without drafts, and `lookups` with those. None: it has
        none. A sequence that it drafts for does without its draft by lookup."""
        plain, self._shape = self._plain(shape), shape
        purse = self._settle(plain, shape.num_tokens)
        self.shadows.turn()
        self._until_trial -= 1
        self._since_plain += 1
        if self._since_plain > REMINDER:
            self._since_plain = 0
            return None
        if purse < 0:
            return None
        candidates = [each for sequence in sequences if (each := self._candidate(sequence, spare)) is not None]
        if not candidates:
            return None
        ready = [each for each in candidates if each.num_behind <= self.costs.ready]
        within = plain + self._pace.spare(shape, 0)
        drafting = self._drafts_of(shape, ready, lookups, within, plain, spare) if ready else None
        self._read(drafting := drafting or Drafting(), shape, candidates, lookups, within)
        return drafting if drafting.chunks else None

    def _plain(self, shape: Shape) -> float:
        """What the step takes without drafts: as it did lately, with as many streams. Where all steps have drafts, the
        target's pace cannot tell."""
        return self._plains.get(shape.num_tokens) or self._pace.predict(shape)

    def _settle(self, plain: float, num_tokens: int) -> float:
        """What is in the purse after the last step."""
        if self._purse is None:
            self._purse = ALLOWANCE * plain
        self._purse = min(self._purse + EARNED * plain - self._spent, MOST * plain)
        self._spent, self._token_seconds = 0.0, plain / num_tokens
        return self._purse

    def _candidate(self, sequence: Sequence, spare: int) -> Candidate | None:
        num_tokens = sequence.num_tokens
        most = min(MAX_DEPTH, spare, sequence.max_length - num_tokens - 1, self.shadows.context - num_tokens)
        if most <= 0:
            return None
        shadow = self.shadows.get(sequence)
        behind = num_tokens if shadow is None else shadow.num_new
        return Candidate(sequence, behind, self.guesses.gains(sequence, most))

    def _drafts_of(
        self, shape: Shape, ready: list[Candidate], lookups: Plan, within: float, plain: float, spare: int
    ) -> Drafting | None:
        """Drafts for those that are ready, where they beat everything else, or are on trial."""
        rest = [each for each in ready if each.sequence not in lookups.lengths]
        without = Plan({}, float(shape.num_tokens), plain)
        best, chosen, floor = lookups, [], max(LEAST_GAIN * without.rate, lookups.rate)
        for others, base in ((rest, lookups), (ready, without)):
            found = self._deepest(shape, others, base, within) if others else base
            if found.rate > max(floor, best.rate):
                best, chosen = found, others
        if chosen:
            return self._commission(shape, chosen, best.rate, MAX_DEPTH, spare)
        return self._try(shape, rest, within, spare)

    def _deepest(self, shape: Shape, chosen: list[Candidate], base: Plan, within: float) -> Plan:
        """The best that a step can bring with drafts of one length for all who are chosen, beside those of `base`."""
        num_rows = sum(base.lengths.values())
        each = shape.num_pairs // shape.num_tokens
        seconds, again = self.costs.first_run(chosen), self.costs.next_run(chosen)
        best, tokens = base, base.num_tokens
        for depth in range(MAX_DEPTH):
            more = [candidate.gains[depth] for candidate in chosen if depth < len(candidate.gains)]
            tokens += sum(more)
            num_rows += len(more)
            verified = with_rows(shape, num_rows, each)
            total = seconds + self._pace.predict(verified) * self._pace.doubt(verified)
            if not more or (shape.num_tokens > 1 and total > within):
                break
            if tokens / total > best.rate:
                best = Plan(base.lengths, tokens, total)
            elif tokens / total < PAST * best.rate:
                break
            seconds += again
        return best

    def _commission(
        self, shape: Shape, chosen: list[Candidate], least: float, depth: int, spare: int
    ) -> Drafting | None:
        drafting, left = Drafting(least=least), self._max_tokens
        each = shape.num_pairs // shape.num_tokens
        one, two = (self._pace.predict(with_rows(shape, rows, each)) for rows in (len(chosen), 2 * len(chosen)))
        drafting.row_seconds = max(0.0, (two - one) / len(chosen))
        for candidate in chosen:
            sequence, behind = candidate.sequence, candidate.num_behind
            num_tokens = min(depth, len(candidate.gains), spare)
            if num_tokens > 0 and behind <= left and self._fits(sequence, behind + num_tokens):
                drafting.chunks[sequence] = behind
                drafting.depths[sequence] = num_tokens
                spare -= num_tokens
                left -= behind
        return drafting if drafting.depths else None

    def _fits(self, sequence: Sequence, num_tokens: int) -> bool:
        return (
            self.shadows.get(sequence) is not None or self.shadows.start(sequence) is not None
        ) and self.shadows.grow(sequence, num_tokens)

    def _try(self, shape: Shape, rest: list[Candidate], within: float, spare: int) -> Drafting | None:
        """A trial for one sequence, where it is time for one and the purse allows it."""
        if not rest or (self._trials == 0 and self._until_trial > 0):
            return None
        one = min(rest, key=lambda candidate: candidate.num_behind)
        more, loss = self._trial(shape, one)
        if self._trials == 0:
            if (self._purse or 0.0) < loss or not self._is_possible(shape, one):
                return None
            self._trials = PROBE_STEPS
            self._until_trial = self._wait = min(2 * self._wait, LAST_WAIT)
        if shape.num_tokens > 1 and self._pace.predict(shape) + more > within:
            return None
        self._trials -= 1
        return self._commission(shape, [one], 0.0, PROBE_DEPTH, spare)

    def _trial(self, shape: Shape, one: Candidate) -> tuple[float, float]:
        """Seconds that each step of a trial takes more, and those that the whole trial is expected to lose."""
        runs = self.costs.first_run([one]) + (PROBE_DEPTH - 1) * self.costs.next_run([one])
        more = runs + self._pace.predict(with_rows(shape, PROBE_DEPTH, 0)) - self._pace.predict(shape)
        return more, PROBE_STEPS * max(more / 4, more - sum(one.gains[:PROBE_DEPTH]) * self._token_seconds)

    def _is_possible(self, shape: Shape, one: Candidate) -> bool:
        """Would drafts pay if all of them were right?"""
        right = Candidate(one.sequence, 1, [1.0] * MAX_DEPTH)
        without = Plan({}, float(shape.num_tokens), self._plain(shape))
        return self._deepest(shape, [right], without, math.inf).rate > LEAST_GAIN * without.rate

    def _read(
        self, drafting: Drafting, shape: Shape, candidates: list[Candidate], lookups: Plan, within: float
    ) -> None:
        """Have the draft model read on in texts that it is behind in."""
        late = [each for each in candidates if each.num_behind > self.costs.ready]
        if not late:
            return
        option = self._deepest(shape, candidates, lookups, math.inf)
        rate = max(lookups.rate, shape.num_tokens / self._plain(shape))
        saved = 1 / rate - 1 / option.rate  # per token
        seconds = within - self._pace.predict(shape)
        if drafting.chunks:
            seconds -= self.costs.first_run(candidates)
        left = self._max_tokens - sum(drafting.chunks.values())
        for candidate in sorted(late, key=lambda each: each.num_behind):
            sequence, start = candidate.sequence, candidate.sequence.num_tokens - candidate.num_behind
            cost = self.costs.read_seconds(start, candidate.num_behind)
            is_earned = self._is_earned(candidate, saved, cost)
            if seconds <= 0 or left <= 0 or not (is_earned or self._is_affordable(candidate, shape, cost)):
                continue
            if (shadow := self.shadows.get(sequence) or self.shadows.start(sequence)) is None:
                continue
            per_token = cost / candidate.num_behind
            num_tokens = min(shadow.num_new - 1, left, max(1, int(seconds / per_token)))
            if num_tokens > 0 and self.shadows.grow(sequence, num_tokens):
                drafting.chunks[sequence] = num_tokens
                drafting.earned += num_tokens * per_token * is_earned
                seconds -= num_tokens * per_token
                left -= num_tokens

    def _is_earned(self, candidate: Candidate, saved: float, cost: float) -> bool:
        """Is what reading a text costs expected to be earned back by the rest of its answer?"""
        sequence = candidate.sequence
        if not self.guesses.is_known(sequence):
            return False
        rest = max(self._pace.mean_output - sequence.num_output, sequence.num_output / 2)
        return saved * min(sequence.max_length - sequence.num_tokens, rest) > MARGIN * cost

    def _is_affordable(self, candidate: Candidate, shape: Shape, cost: float) -> bool:
        """May it be read for finding out what drafts give?"""
        if self._until_trial > 0:
            return False
        is_known = self.guesses.is_known(candidate.sequence)
        _, loss = self._trial(shape, candidate)
        whole = (cost + loss) * (AGAIN if is_known else 1)
        return (self._purse or 0.0) > whole and self._is_possible(shape, candidate)

    # while drafts are made

    def goes_on(self, drafting: Drafting, gain: float, place: int, sequence: Sequence, seconds: float) -> bool:
        """Is a token more worth its time, where those before are right with a chance of `gain`, and its part of the
        run takes so many seconds?"""
        gain *= self.guesses.chance(sequence, place)
        return gain >= drafting.least * (seconds + drafting.row_seconds)

    # what came of it

    def drafted(self, drafting: Drafting, shape: Shape, kinds: dict[Sequence, list[int]]) -> None:
        """The drafts are made, and `kinds` tell how sure their tokens are; the step does `shape` beside them."""
        self._drafts = {sequence: each for sequence, each in kinds.items() if each}
        self._has_drafts = bool(self._drafts)
        self._spent += max(0.0, drafting.seconds - drafting.earned)

    def stepped(self, shape: Shape, seconds: float) -> None:
        """The target's step took so long: what that is over a plain one has been spent on drafts, if it had any."""
        if shape == self._shape:
            known = self._plains.get(shape.num_tokens, seconds)
            self._plains[shape.num_tokens] = known + (min(seconds, OUTLIER * known) - known) / 4
            self._since_plain = 0
        elif self._has_drafts and self._shape is not None:
            plain = self._plain(self._shape)
            self._spent += min(seconds, OUTLIER * max(plain, self._pace.predict(shape))) - plain
        self._shape, self._has_drafts = None, False

    def tell(self, sequence: Sequence, num_accepted: int) -> None:
        """A sequence keeps so many tokens of its draft."""
        kinds = self._drafts.pop(sequence, None)
        if kinds is None:  # it was drafted by lookup
            return
        self.num_drafted += len(kinds)
        self.num_accepted += num_accepted
        self._spent -= num_accepted * self._token_seconds
        self.guesses.learn(sequence, kinds, num_accepted)

    def forget(self, sequence: Sequence) -> None:
        """A sequence has been displaced, or has ended."""
        self.shadows.forget(sequence)

    def finish(self, sequence: Sequence) -> None:
        """A sequence has ended."""
        self.forget(sequence)
        self.guesses.finish(sequence)
        self._drafts.pop(sequence, None)
