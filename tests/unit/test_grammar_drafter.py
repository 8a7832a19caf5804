"""Guesses under a grammar: what is forced, what was seen before, and what has become a habit."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Rows

import pytest

from pelton.engine.drafter import Drafter
from pelton.engine.grammar_drafter import GrammarDrafter, GuessAcceptance
from pelton.engine.sequence import Sequence, SequenceGroup

from .toy_executor import request
from .toy_grammar import QUOTES, Template

ANY = frozenset(range(100))


def only(*tokens: int) -> list[frozenset[int]]:
    return [frozenset({token}) for token in tokens]


def started(prompt: list[int], places: Rows[frozenset[int]], **params: object) -> tuple[Sequence, Template, Drafter]:
    sequence = SequenceGroup(request("a", prompt, max_tokens=100, **params), 0).sequences[0]  # type: ignore[arg-type]
    sequence.constraint = grammar = Template(places)
    sequence.drafter = drafter = GrammarDrafter(GuessAcceptance())
    return sequence, grammar, drafter


def draw(sequence: Sequence, *tokens: int) -> None:
    for token in tokens:
        sequence.tokens.append(token)
        assert sequence.constraint is not None
        sequence.constraint.accept(token)


def test_what_is_forced_is_guessed_and_all_but_sure():
    sequence, grammar, drafter = started([1, 2, 3], [*only(7, 8, 9), ANY, *only(5)])
    gains = drafter.guess(sequence, 32)
    assert drafter.guessed.tolist() == [7, 8, 9]
    assert gains == sorted(gains, reverse=True)
    assert gains[-1] > 0.95
    assert grammar.at == 0
    assert sequence.tokens.tolist() == [1, 2, 3]
    assert len(drafter.guess(sequence, 2)) == len(drafter.guessed) == 2
    assert drafter.guess(sequence, 0) == []


def test_lookup_goes_on_behind_what_is_forced_and_leads_to_the_next_run():
    sequence, _, drafter = started([7, 8, 40, 41, 50, 51], [*only(7, 8), ANY, ANY, *only(60, 61), ANY])
    gains = drafter.guess(sequence, 32)
    assert drafter.guessed.tolist() == [7, 8, 40, 41, 60, 61]
    assert gains[1] > 0.95 > gains[2] > gains[3]
    assert gains[5] > 0.97 * gains[3]


def test_what_the_grammar_does_not_allow_is_not_guessed():
    sequence, _, drafter = started([7, 8, 40, 41], [*only(7, 8), ANY - {40}, ANY])
    drafter.guess(sequence, 32)
    assert drafter.guessed.tolist() == [7, 8]


def test_a_token_that_was_drawn_where_the_same_bytes_had_to_come_is_guessed_again():
    places = [*only(7), QUOTES, ANY, *only(8), QUOTES, ANY, *only(9), QUOTES - {81}]
    sequence, _, drafter = started([1], places)
    drafter.guess(sequence, 32)
    assert drafter.guessed.tolist() == [7]
    draw(sequence, 7)
    drafter.guess(sequence, 32)
    draw(sequence, 80)
    drafter.guess(sequence, 32)
    draw(sequence, 30)
    drafter.guess(sequence, 32)
    assert drafter.guessed.tolist() == [8, 80, 30, 9]
    draw(sequence, 8, 81, 31)
    drafter.guess(sequence, 32)
    assert drafter.guessed.tolist() == [9, 80]


@pytest.mark.parametrize(
    ("ends", "expected"), [({"end_ids": (9,)}, [7, 8]), ({"stop_token_ids": (7,)}, []), ({}, [7, 8, 9])]
)
def test_no_token_that_ends_the_answer_is_guessed_and_nothing_behind_the_grammars_end(ends, expected):
    sequence, _, drafter = started([9, 1, 2], only(7, 8, 9), **ends)
    drafter.guess(sequence, 32)
    assert drafter.guessed.tolist() == expected


def test_a_grammar_that_breaks_in_a_run_ends_the_guess_and_not_the_answer():
    sequence, grammar, drafter = started([1], only(*range(10)))
    grammar.breaks_at = 4
    drafter.guess(sequence, 32)
    assert drafter.guessed.tolist() == [0, 1, 2, 3]
    assert grammar.error is None


def test_lookup_that_is_always_wrong_does_not_make_forced_tokens_less_sure():
    places = [place for _ in range(30) for place in (*only(7, 8), ANY)]
    sequence, _, drafter = started([7, 8, 40], places)
    for turn in range(30):
        gains = drafter.guess(sequence, 32)
        draw(sequence, 7, 8, 50 + turn)
    assert gains[1] > 0.95
    assert len(gains) == 2


def test_it_is_measured_whether_forced_tokens_are_drawn():
    """A logits processor of the user's may have its own will."""
    sequence, grammar, drafter = started([1], [frozenset({7})] * 90)
    for turn in range(30):
        gains = drafter.guess(sequence, 32)
        sequence.tokens.append(8 + turn)
        grammar.at += 1
    assert len(gains) <= 1


def test_steps_that_ask_for_no_guess_are_made_up_for():
    sequence, _, drafter = started([1], [*only(7, 8), ANY, ANY, *only(9)])
    drafter.guess(sequence, 32)
    draw(sequence, 7, 8, 33, 34)
    drafter.guess(sequence, 32)
    assert drafter.guessed == array("i", [9])
