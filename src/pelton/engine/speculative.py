"""Drafted tokens: how many of them are worth their time, and which of them the model would have drawn itself.

Every row of a draft is drawn with the key of its own position, as if the drafted tokens before it were accepted. Those
before the first that differs from what was drawn are; what was drawn in its place is what plain decoding draws.

A draft costs time whether it is accepted or not. `Speculation` weighs the two. How likely a drafted token is right is
what a sequence's `Drafter` has measured. It is measured in plain steps just as well: what would have been drafted is
compared with what was drawn, so that finding out that drafts do not pay costs nothing. What a step with more rows takes
comes from `Pace`. Of all drafted tokens that there could be, the likeliest are taken, as many as give the batch the
most tokens per second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import chain, islice

from pelton.backends.base import Sampled
from pelton.engine.batch import Row
from pelton.engine.draft_policy import DraftPolicy
from pelton.engine.drafter import Drafter, LookupDrafter, MatchAcceptance
from pelton.engine.drafting import LEAST_GAIN, PAST, Drafting, Plan, with_rows
from pelton.engine.grammar_drafter import GrammarDrafter, GuessAcceptance
from pelton.engine.pace import Pace, Shape
from pelton.engine.sequence import Sequence

MAX_DRAFT = 32
"""Tokens of a draft."""
MAX_LOOKED = 16
"""Sequences that a step looks at for drafts: its time on the host is bounded. Others have their turn in the next."""
FIRST_PROBE, LAST_PROBE = 16, 1024
"""Steps with offers to the first one that drafts more than seems best, to see what more rows cost; the time to the
next one doubles."""
REST = 16
"""Where drafts cannot pay, because of what rows cost, one step in so many asks for some nevertheless."""
MOST_LOST = 0.02
"""Share of the time since the last probe that one may be expected to lose."""
NUM_PROBES = 6
"""Each probe has twice the rows of the one before, until so many; then they begin again with one per sequence."""


def count_accepted(rows: list[Row], sampled: Sampled) -> dict[Sequence, int]:
    """How many tokens of its draft each sequence keeps; those without a draft in the step are left out."""
    ids, errors = sampled.ids.tolist(), sampled.errors.tolist()
    accepted: dict[Sequence, int] = {}
    for i, (sequence, offset, _) in enumerate(rows):
        if offset > 0:
            kept = accepted.setdefault(sequence, 0)
            was_drawn = not errors[i - 1] and ids[i - 1] == sequence.draft[offset - 1]
            accepted[sequence] = kept + (was_drawn and kept == offset - 1)
    return accepted


class Speculation:
    """Decides per step which sequences get drafts, and how long ones. `model`: the policy of a draft model."""

    def __init__(self, pace: Pace, model: DraftPolicy | None = None) -> None:
        self.pace = pace
        self.model = model
        self._everyone = {is_drawn: MatchAcceptance(window=1000.0) for is_drawn in (False, True)}
        """Of greedy sequences and of others."""
        self._under_grammars = {is_drawn: GuessAcceptance(window=1000.0) for is_drawn in (False, True)}
        """The same, where a grammar says which guesses can be right."""
        self._turn = 0
        self._num_probes = 0
        self._until_probe = self._probe_after = FIRST_PROBE
        self._rest = self._rest_of = 0
        """Steps to come that ask for no drafts, as long as they have so many sequences."""

    def rests(self, num_sequences: int) -> bool:
        """Is there no use in asking for drafts for the step that comes, of so many sequences?"""
        if self._rest == 0 or num_sequences < self._rest_of:
            return False
        self._rest -= 1
        return True

    def draft(self, shape: Shape, sequences: Mapping[Sequence, int], spare: int) -> Drafting | None:
        """Give sequences of a step their drafts, of `spare` tokens at most in all; those that the draft model is to
        make are returned. All of them decode; `shape` is what the step does without drafts."""
        can_pay = self.model is not None or self._can_pay(shape, spare)
        self._rest, self._rest_of = 0 if can_pay else REST - 1, len(sequences)
        looked = self._looked(sequences)
        offers = self._offers(looked, spare)
        if not offers and self.model is None:
            return None
        plan = self._choose(shape, offers, spare)
        drafting = None if self.model is None else self.model.plan(shape, looked, plan, spare)
        for sequence, num_tokens in plan.lengths.items():
            if drafting is None or sequence not in drafting.depths:
                assert sequence.drafter is not None
                sequence.draft = sequence.drafter.guessed[:num_tokens]
        return drafting

    def _looked(self, sequences: Mapping[Sequence, int]) -> list[Sequence]:
        """The sequences whose turn it is to be looked at. The tokens of a beam search's slots change with their
        hypotheses."""
        start = self._turn % len(sequences) if len(sequences) > MAX_LOOKED else 0
        self._turn = start + MAX_LOOKED
        looked = islice(chain(islice(sequences, start, None), islice(sequences, start)), MAX_LOOKED)
        return [sequence for sequence in looked if sequence.group.beams is None]

    def _offers(self, looked: list[Sequence], spare: int) -> list[tuple[float, int, Sequence]]:
        """All tokens that could be drafted without the draft model: how likely each is accepted, its place in its draft
        (negative), and of which sequence."""
        offers: list[tuple[float, int, Sequence]] = []
        for sequence in looked:
            if sequence.drafter is None:
                sequence.drafter = self._new_drafter(sequence)
            most = min(MAX_DRAFT, spare, sequence.max_length - len(sequence.tokens) - 1)
            gains = sequence.drafter.guess(sequence, most)
            offers += [(gain, -place, sequence) for place, gain in enumerate(gains)]
        return offers

    def _new_drafter(self, sequence: Sequence) -> Drafter:
        is_drawn = sequence.group.request.sampling.temperature > 0
        if sequence.constraint is None:
            return LookupDrafter(self._everyone[is_drawn])
        return GrammarDrafter(self._under_grammars[is_drawn])

    def _can_pay(self, shape: Shape, spare: int) -> bool:
        """Would there be more tokens per second with some number of drafted tokens, if all were accepted?"""
        least, within = LEAST_GAIN * shape.num_tokens / self.pace.predict(shape), self._within(shape)
        num_drafted = 1
        while num_drafted <= min(spare, MAX_DRAFT * shape.num_tokens):
            seconds = self._seconds(shape, num_drafted)
            if seconds <= within and shape.num_tokens + num_drafted > least * seconds:
                return True
            num_drafted *= 2
        return False

    def _within(self, shape: Shape) -> float:
        """The most seconds that a step with drafts may take: with several streams, others wait for it."""
        return self.pace.predict(shape) + self.pace.spare(shape, 0) if shape.num_tokens > 1 else math.inf

    def _seconds(self, shape: Shape, num_drafted: int) -> float:
        """What a step may take with so many drafted tokens."""
        drafted = with_rows(shape, num_drafted, shape.num_pairs // shape.num_tokens)
        return self.pace.predict(drafted) * self.pace.doubt(drafted)

    def _choose(self, shape: Shape, offers: list[tuple[float, int, Sequence]], spare: int) -> Plan:
        """How many tokens to draft for which sequences, and what that is expected to give."""
        offers.sort(key=lambda offer: offer[:2], reverse=True)
        plain = self.pace.predict(shape)
        within = self._within(shape)
        each = shape.num_pairs // shape.num_tokens
        best, num_best, tokens = LEAST_GAIN * shape.num_tokens / plain, 0, float(shape.num_tokens)
        for num_drafted, (gain, _, _) in enumerate(islice(offers, spare), 1):
            tokens += gain
            seconds = self._seconds(shape, num_drafted)
            if seconds > within:
                break
            if tokens / seconds > best:
                best, num_best = tokens / seconds, num_drafted
            elif tokens / seconds < PAST * best:
                break
        if offers:
            num_best = self._probe(shape, offers[:spare], num_best, within)
        lengths: dict[Sequence, int] = {}
        for _, _, sequence in offers[:num_best]:
            lengths[sequence] = lengths.get(sequence, 0) + 1
        tokens = shape.num_tokens + sum(gain for gain, _, _ in offers[:num_best])
        return Plan(lengths, tokens, self.pace.predict(with_rows(shape, num_best, each)) if num_best else plain)

    def _probe(self, shape: Shape, offers: list[tuple[float, int, Sequence]], num_best: int, within: float) -> int:
        """How many tokens to draft in place of `num_best`: more, if it is time to see what they cost, they would pay
        if they cost nothing, and little is expected to be lost if they do not."""
        self._until_probe -= 1 + self._rest
        if self._until_probe > 0:
            return num_best
        wanted = min(shape.num_tokens << self._num_probes % NUM_PROBES, len(offers))
        if wanted <= num_best:
            self._num_probes += 1
            return num_best
        gains = [gain for gain, _, _ in offers[:wanted]]
        if shape.num_tokens + sum(gains) < LEAST_GAIN * (shape.num_tokens + sum(gains[:num_best])):
            return num_best
        plain, seconds = self.pace.predict(shape), self.pace.predict(with_rows(shape, wanted, 0))
        lost = seconds - self.pace.predict(with_rows(shape, num_best, 0)) - sum(gains[num_best:]) * plain
        if seconds > within or lost > MOST_LOST * plain * (self._probe_after - self._until_probe):
            return num_best
        self._num_probes += 1
        self._until_probe = self._probe_after = min(2 * self._probe_after, LAST_PROBE)
        return wanted
