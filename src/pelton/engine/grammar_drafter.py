"""Guesses under a grammar.

Where the grammar leaves no choice, its token is the guess; elsewhere it is lookup's, if the grammar allows it. A run of
forced tokens gives lookup a longer match, and what lookup guesses leads to the next run: in JSON, from the end of one
value over the next key to the beginning of its value.

Between the two lie tokens whose beginning alone is forced: behind a key its quote must come, and whether the colon is
in the same token is the model's habit. What was drawn last where the same bytes had to come is the guess there.
"""

from __future__ import annotations

from array import array
from collections import deque
from typing import NamedTuple

from pelton.engine.acceptance import Acceptance
from pelton.engine.constraints import Constraint
from pelton.engine.lookup import Ahead, Lookup
from pelton.engine.sequence import Sequence

FIRST_FORCED = 0.99
"""That a forced token is right, before anything was seen. Masks leave no other; it is measured all the same."""
FIRST_CHANCES = (0.7, 0.4, 0.6, 0.7, 0.8, 0.85, 0.9)
"""That a token is right that was drawn last where the same bytes had to come; and one that the grammar allows behind a
match, by the bits of its length."""
HABIT = 0
"""The kind of the former."""
LEAST_CHANCE = 0.1
"""A token that is less likely to be accepted is not guessed: going ahead takes some 40 us of the step for each."""
MOST_HABITS = 4
"""Tokens that are remembered for the same bytes."""


class GuessAcceptance(Acceptance):
    """How often guesses that the grammar allows were right: those behind matches of some length, and
    habits."""

    __slots__ = ()

    def __init__(self, prior: GuessAcceptance | None = None, window: float = 24.0) -> None:
        super().__init__(FIRST_CHANCES, prior, window)


class _Guess(NamedTuple):
    token: int
    acceptance: Acceptance
    """Where it is known how often guesses like it are right, by their kind."""
    kind: int


class GrammarDrafter:
    """Of a sequence with a grammar."""

    __slots__ = ("_acceptance", "_begun", "_forced", "_guesses", "_habits", "_lookup", "_num_tokens", "guessed")

    def __init__(self, everyone: GuessAcceptance) -> None:
        self.guessed = array("i")
        self._lookup = Lookup()
        self._acceptance = GuessAcceptance(everyone)
        self._forced = Acceptance((FIRST_FORCED,))
        """Of forced tokens, apart from the others: where lookup is wrong, they are as right as ever."""
        self._habits: dict[bytes, list[int]] = {}
        """What had to come -> the tokens that were drawn there, the latest first."""
        self._num_tokens = 0
        """Of the sequence, at the last guess."""
        self._guesses: list[_Guess] = []
        """Those of `guessed`, and perhaps one more, which is only looked at."""
        self._begun: list[bytes] = []
        """What had to come at each place of the last guess where no token was forced, and behind it."""

    def guess(self, sequence: Sequence, most: int) -> list[float]:
        """What its grammar forces, what followed the same tokens before, and what it has a habit of."""
        assert sequence.constraint is not None
        self._learn(sequence.tokens)
        self._lookup.read(sequence.tokens, sequence.num_prompt, lambda length, is_right: None)
        self._num_tokens, self._guesses, self._begun = len(sequence.tokens), [], []
        gains = self._go_ahead(sequence, sequence.constraint.fork(), most)
        self.guessed = array("i", [guess.token for guess in self._guesses[: len(gains)]])
        return gains

    def _learn(self, tokens: array[int]) -> None:
        """Compare the last guess with what was drawn."""
        for place, token in enumerate(tokens[self._num_tokens :]):
            if place < len(self._begun) and (begun := self._begun[place]):
                others = [other for other in self._habits.get(begun, ()) if other != token]
                self._habits[begun] = [token, *others[: MOST_HABITS - 1]]
            if place == len(self._guesses):
                break
            guess = self._guesses[place]
            guess.acceptance.observe(guess.kind, token == guess.token)
            if token != guess.token:
                break

    def _go_ahead(self, sequence: Sequence, grammar: Constraint, most: int) -> list[float]:
        """Guess token by token. `grammar` is led along."""
        ahead, forced = self._lookup.ahead(sequence.tokens), deque[int]()
        gains: list[float] = []
        gain = 1.0
        while len(gains) < most and not grammar.is_finished and grammar.error is None:
            forced = forced or deque(grammar.forced())
            guess = self._next(grammar, ahead, forced)
            if guess is None or guess.token in sequence.group.end_ids:
                break
            self._guesses.append(guess)
            gain *= guess.acceptance.chance(guess.kind)
            if gain < LEAST_CHANCE:
                break
            gains.append(gain)
            grammar.accept(guess.token)
            ahead.take(guess.token)
        return gains

    def _next(self, grammar: Constraint, ahead: Ahead, forced: deque[int]) -> _Guess | None:
        """The guess at the next token, which the grammar allows."""
        begun = b"" if forced else grammar.begun()
        self._begun.append(begun)
        if forced:
            return _Guess(forced.popleft(), self._forced, 0)
        if ahead.length and grammar.check([ahead.token]):
            return _Guess(ahead.token, self._acceptance, ahead.length.bit_length())
        habits = self._habits.get(begun, ())
        return next((_Guess(token, self._acceptance, HABIT) for token in habits if grammar.check([token])), None)
