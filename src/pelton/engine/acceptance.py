"""How often drafted tokens turn out right, by their kind: what is older counts less."""

from __future__ import annotations

WEIGHT = 4.0
"""Observations that what was thought before stands for."""
FIRST_TRUST = (2.0, 2.5)
"""How often a new sequence counts as having been right, and as expected to be: a little less than others."""


class Acceptance:
    """How often a drafted token of each kind was right, seen over the last `window` ones. `first`: what is thought of
    each kind before anything was seen, unless there is a `prior`, which learns along."""

    __slots__ = ("_expected", "_first", "_keep", "_prior", "_right", "_seen", "_trusted")

    def __init__(self, first: tuple[float, ...], prior: Acceptance | None = None, window: float = 24.0) -> None:
        self._first = first
        self._prior = prior
        self._keep = 1 - 1 / window
        self._seen = [0.0] * len(first)
        self._right = [0.0] * len(first)
        self._trusted, self._expected = FIRST_TRUST
        """How often it was right, and how often the prior would have had it."""

    def observe(self, kind: int, is_right: bool) -> None:
        """One more observation, also for the prior."""
        self._trusted = self._trusted * self._keep + is_right
        self._expected = self._expected * self._keep + self._thought(kind)
        self._seen[kind] = self._seen[kind] * self._keep + 1
        self._right[kind] = self._right[kind] * self._keep + is_right
        if self._prior is not None:
            self._prior.observe(kind, is_right)

    @property
    def num_seen(self) -> float:
        """Observations, those that are old counting less."""
        return sum(self._seen)

    def _thought(self, kind: int) -> float:
        return self._first[kind] if self._prior is None else self._prior.chance(kind)

    def chance(self, kind: int) -> float:
        """That a token of that kind is right."""
        thought = self._thought(kind)
        if self._prior is not None:  # a text that is less like its past than others is so for all kinds
            thought *= min(1.0, self._trusted / self._expected)
        return (self._right[kind] + WEIGHT * thought) / (self._seen[kind] + WEIGHT)
