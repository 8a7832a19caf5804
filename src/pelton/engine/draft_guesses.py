"""What is known of how often the draft model's tokens are right."""

from __future__ import annotations

from pelton.engine.acceptance import Acceptance
from pelton.engine.sequence import Sequence

KNOWN = 7.0
"""Tokens drafted before what is seen of them is trusted more than what was thought before."""
PLACES = (0.7, 0.7, 0.7, 0.7)
"""That a drafted token is right where those before it are, by its place; the last one has the rest."""
BOUNDS = (0.3, 0.5, 0.7, 0.85, 0.95, 0.99)
"""Of the probability that the draft model gave to its token."""
SURE = (0.2, 0.4, 0.55, 0.7, 0.82, 0.92, 0.97)
"""That the token is right, between these bounds."""


class _Kind:
    """Of one kind of sequence: greedy ones, or others."""

    def __init__(self) -> None:
        self.places = Acceptance(PLACES, window=400.0)
        self.sureness = Acceptance(SURE, window=1000.0)


class DraftGuesses:
    """By a token's place in its draft, and by how sure the draft model was of it."""

    def __init__(self) -> None:
        self._kinds = {is_drawn: _Kind() for is_drawn in (False, True)}
        self._own: dict[Sequence, Acceptance] = {}
        """By place, of each sequence that has had drafts."""

    def _of(self, sequence: Sequence) -> _Kind:
        return self._kinds[sequence.group.request.sampling.temperature > 0]

    def is_known(self, sequence: Sequence) -> bool:
        """Has enough been seen for sequences like this one?"""
        return self._of(sequence).places.num_seen >= KNOWN

    def chance(self, sequence: Sequence, place: int) -> float:
        """That the token at that place of a draft is right where those before it are."""
        known = self._own.get(sequence) or self._of(sequence).places
        return known.chance(min(place, len(PLACES) - 1))

    def gains(self, sequence: Sequence, num_tokens: int) -> list[float]:
        """For each token of a draft, how likely it is accepted."""
        gains, gain = [], 1.0
        for place in range(num_tokens):
            gain *= self.chance(sequence, place)
            gains.append(gain)
        return gains

    def sureness(self, sequence: Sequence, probability: float) -> tuple[int, float]:
        """Of a token that the draft model drew with that probability: its kind, and how likely it is right."""
        kind = sum(probability >= bound for bound in BOUNDS)
        return kind, self._of(sequence).sureness.chance(kind)

    def learn(self, sequence: Sequence, kinds: list[int], num_accepted: int) -> None:
        """A sequence keeps so many tokens of its draft; `kinds`: how sure the draft model was of each token."""
        everyone = self._of(sequence)
        own = self._own.get(sequence)
        if own is None:
            own = self._own[sequence] = Acceptance(PLACES, everyone.places)
        for place, kind in enumerate(kinds[: num_accepted + 1]):
            own.observe(min(place, len(PLACES) - 1), place < num_accepted)
            everyone.sureness.observe(kind, place < num_accepted)

    def finish(self, sequence: Sequence) -> None:
        """A sequence has ended."""
        self._own.pop(sequence, None)
