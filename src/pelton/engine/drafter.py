"""What is guessed of a sequence's next tokens, and how likely each guess is right.

Prompt lookup guesses what followed the last tokens earlier in the sequence. How often that was right is measured for
matches of each length, over each sequence and over all. Under a grammar more is known (`grammar_drafter`).
"""

from __future__ import annotations

from array import array
from collections.abc import Collection
from typing import Protocol

from pelton.engine.acceptance import Acceptance
from pelton.engine.lookup import LONGEST, Lookup
from pelton.engine.sequence import Sequence

LEAST_CHANCE = 0.04
"""A token that is less likely to be accepted is not guessed."""
FIRST_CHANCES = (0.0, 0.05, 0.4, 0.6, 0.75, 0.85, 0.9)
"""That a token is right, by the bits of the match's length, before anything was seen."""


class MatchAcceptance(Acceptance):
    """How often the token behind a match of some length was right. Lengths are told apart by their number of bits."""

    __slots__ = ()

    def __init__(self, prior: MatchAcceptance | None = None, window: float = 24.0) -> None:
        super().__init__(FIRST_CHANCES, prior, window)

    def learn(self, length: int, is_right: bool) -> None:
        """One more observation."""
        self.observe(length.bit_length(), is_right)

    def gains(self, length: int, num_tokens: int) -> list[float]:
        """For each token of a draft behind a match of that length, how likely it is accepted, as far as that is likely
        at all. Each accepted token makes the match longer."""
        chances = [self.chance(bits) for bits in range(length.bit_length(), LONGEST.bit_length() + 1)]
        gains: list[float] = []
        gain = 1.0
        for match in range(length, length + num_tokens):
            gain *= chances[min(match, LONGEST).bit_length() - length.bit_length()]
            if gain < LEAST_CHANCE:
                break
            gains.append(gain)
        return gains


class Drafter(Protocol):
    """What speculation keeps of one sequence."""

    guessed: array[int]
    """The last guess. None of its tokens ends an answer, and the sequence's grammar allows all of them."""

    def guess(self, sequence: Sequence, most: int) -> list[float]:
        """Guess at its next tokens, `most` at most. For each, how likely it and those before it are right."""
        ...


class LookupDrafter:
    """Of a sequence without a grammar."""

    __slots__ = ("acceptance", "guessed", "lookup")

    def __init__(self, everyone: MatchAcceptance) -> None:
        self.lookup = Lookup()
        self.acceptance = MatchAcceptance(everyone)
        self.guessed = array("i")

    def guess(self, sequence: Sequence, most: int) -> list[float]:
        """What followed its last tokens before."""
        lookup, tokens = self.lookup, sequence.tokens
        is_read = lookup.read(tokens, sequence.num_prompt, self.acceptance.learn)
        gains = self.acceptance.gains(lookup.length, most) if is_read and lookup.length else []
        self.guessed = _until(sequence.group.end_ids, lookup.draft(tokens, len(gains))) if gains else array("i")
        return gains[: len(self.guessed)]


def _until(ends: Collection[int], tokens: array[int]) -> array[int]:
    """Up to the first of `ends`."""
    return tokens[: next((place for place, token in enumerate(tokens) if token in ends), len(tokens))]
