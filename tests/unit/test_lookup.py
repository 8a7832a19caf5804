"""Prompt lookup, against a search of the whole text at every token."""

from __future__ import annotations

import random
from array import array

import pytest

from pelton.engine import lookup as lookups
from pelton.engine.lookup import LONGEST, MAX_READ, Lookup


def search(tokens: list[int]) -> tuple[int, int]:
    """The length of the longest match of the last tokens, and the latest place behind one."""
    best = (0, 0)
    for place in range(1, len(tokens)):
        length = 0
        while length < min(LONGEST, place) and tokens[place - 1 - length] == tokens[len(tokens) - 1 - length]:
            length += 1
        if length >= max(1, best[0]):
            best = (length, place)
    return best


def read(lookup: Lookup, tokens: list[int], num_prompt: int = 0) -> list[tuple[int, bool]]:
    learned: list[tuple[int, bool]] = []
    assert lookup.read(array("i", tokens), num_prompt, lambda *seen: learned.append(seen))
    return learned


@pytest.mark.parametrize("seed", range(6))
def test_the_longest_match_and_what_followed_it(monkeypatch, seed):
    monkeypatch.setattr(lookups, "MAX_PLACES", 1 << 30)
    rng = random.Random(seed)
    tokens = [rng.randrange(4) for _ in range(200)]
    lookup = Lookup()
    for end in range(1, len(tokens) + 1):
        before = lookup.length
        learned = read(lookup, tokens[:end])
        length, place = search(tokens[:end])
        assert len(learned) == (before > 0)
        if learned and learned[0][1]:  # it goes on where it was: a place as good, if not the latest
            assert lookup.length == min(before + 1, LONGEST)
        else:
            assert lookup.length == length
            if length:
                assert lookup.draft(array("i", tokens[:end]), 1)[0] == tokens[place]


def test_it_learns_of_the_output_alone():
    prompt = [1, 2, 3, 4, 5, 6]
    lookup = Lookup()
    assert read(lookup, prompt, len(prompt)) == []
    assert lookup.length == 0
    assert read(lookup, [*prompt, 1], len(prompt)) == []
    assert lookup.length == 1
    assert read(lookup, [*prompt, 1, 2], len(prompt)) == [(1, True)]
    assert lookup.length == 2
    assert read(lookup, [*prompt, 1, 2, 3, 4, 9], len(prompt)) == [(2, True), (3, True), (4, False)]
    assert lookup.length == 0


def test_a_new_pair_is_matched_by_its_last_token():
    tokens = [5, 1, 2, 8, 1, 3, 9, 1]
    lookup = Lookup()
    read(lookup, tokens)
    assert lookup.length == 1
    assert lookup.draft(array("i", tokens), 2).tolist() == [3, 9]


def test_a_draft_goes_on_in_its_period():
    tokens = [7, 1, 2, 3, 1, 2, 3]
    lookup = Lookup()
    read(lookup, tokens)
    assert lookup.draft(array("i", tokens), 8).tolist() == [1, 2, 3, 1, 2, 3, 1, 2]
    assert lookup.draft(array("i", tokens), 2).tolist() == [1, 2]


def test_a_long_text_is_read_in_parts():
    tokens = array("i", [n % 1000 for n in range(2 * MAX_READ + 10)])
    lookup = Lookup()
    assert [lookup.read(tokens, len(tokens), lambda *_: None) for _ in range(3)] == [False, False, True]
    assert lookup.length == LONGEST
    assert lookup.draft(tokens, 3).tolist() == [(tokens[-1] + i) % 1000 for i in (1, 2, 3)]


def test_a_text_over_the_limit_has_no_match(monkeypatch):
    monkeypatch.setattr(lookups, "MAX_TOKENS", 20)
    lookup = Lookup()
    assert lookup.read(array("i", [1, 2] * 10), 20, lambda *_: None)
    assert lookup.length > 0
    assert not lookup.read(array("i", [1, 2] * 11), 20, lambda *_: None)
    assert lookup.length == 0


@pytest.mark.parametrize("seed", range(6))
def test_going_ahead_finds_what_reading_would_and_leaves_the_index_alone(monkeypatch, seed):
    monkeypatch.setattr(lookups, "MAX_PLACES", 1 << 30)
    rng = random.Random(seed)
    tokens = array("i", [rng.randrange(6) for _ in range(200)])
    lookup = Lookup()
    read(lookup, tokens.tolist())
    expected = lookup.length, lookup.draft(tokens, 5)
    ahead = lookup.ahead(tokens)
    text = tokens.tolist()
    for _ in range(20):
        token = ahead.token if ahead.length and rng.random() < 0.5 else rng.randrange(6)
        was = ahead.length
        is_right = was > 0 and ahead.token == token
        ahead.take(token)
        text.append(token)
        length, place = search_within(text, len(tokens))
        if is_right:
            assert ahead.length == min(was + 1, LONGEST)
        else:
            assert ahead.length == length
            if length:
                assert ahead.token == text[place]
    assert (lookup.length, lookup.draft(tokens, 5)) == expected


def search_within(text: list[int], num_indexed: int) -> tuple[int, int]:
    """The longest match that ends among the tokens that were read."""
    best = (0, 0)
    for place in range(1, num_indexed + 1):
        length = 0
        while length < min(LONGEST, place) and text[place - 1 - length] == text[len(text) - 1 - length]:
            length += 1
        if length >= max(1, best[0]):
            best = (length, place)
    return best
