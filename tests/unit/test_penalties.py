"""What a sequence's own tokens do to its next logits, against the plainest way to say it."""

from __future__ import annotations

import math
from array import array
from typing import Any

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pelton.engine.batch import Row
from pelton.engine.penalties import LARGEST_PENALTY, LONGEST_REPEAT, additions, dry_penalty
from pelton.engine.sequence import Sequence, SequenceGroup
from pelton.request import SamplingParams
from tests.unit.toy_executor import request


def dry(context: list[int], breakers: tuple[int, ...] = (), **params: Any) -> dict[int, float]:
    asked = SamplingParams(**({"dry_multiplier": 1.0, "dry_base": 2.0, "dry_allowed_length": 2} | params))
    ids, values = dry_penalty(np.array(context, np.int32), asked, frozenset(breakers))
    return dict(zip(ids.tolist(), values.tolist(), strict=True))


def by_hand(context: list[int], breakers: set[int], allowed: int) -> dict[int, float]:
    longest: dict[int, int] = {}
    for end in range(len(context) - 1):
        length = 0
        while length <= end and context[end - length] == context[-1 - length] not in breakers:
            length += 1
        if length >= max(1, allowed) and context[end + 1] not in breakers:
            longest[context[end + 1]] = max(longest.get(context[end + 1], 0), length)
    return {token: -(2.0 ** (length - allowed)) for token, length in longest.items()}


@given(st.lists(st.integers(0, 3), max_size=40), st.sets(st.integers(0, 3), max_size=2), st.integers(1, 4))
def test_dry_is_what_it_says(context: list[int], breakers: set[int], allowed: int) -> None:
    assert dry(context, tuple(breakers), dry_allowed_length=allowed) == by_hand(context, breakers, allowed)


def test_dry_examples() -> None:
    assert dry([1, 2, 3, 9, 1, 2]) == {3: -1.0}
    assert dry([7, 1, 2, 3, 9, 7, 1, 2], dry_multiplier=0.5) == {3: -1.0}
    assert dry([1, 2, 3, 9, 1, 2], dry_allowed_length=3) == {}
    assert dry([1, 2, 3, 9, 1, 2], breakers=(2,)) == {}
    assert dry([1, 2, 3, 9, 1, 2], breakers=(3,)) == {}
    assert dry([1, 2, 3, 9, 1, 2], dry_penalty_last_n=3) == {}
    assert dry([1, 2, 3, 9, 1, 2], dry_penalty_last_n=0) == {}
    assert dry([1, 2, 3, 9, 1, 2], dry_penalty_last_n=6) == {3: -1.0}
    assert dry([5] * 400, dry_base=1.01)[5] == np.float32(-(1.01 ** (LONGEST_REPEAT - 2)))
    assert dry([5] * 400, dry_base=100.0)[5] == -LARGEST_PENALTY


def sequence(output: tuple[int, ...], bad_words: tuple[tuple[int, ...], ...], **params: Any) -> Sequence:
    asked = request("a", (1, 2, 3), **({"bad_words": ("x",)} | params))
    made = SequenceGroup(msgspec.structs.replace(asked, bad_words_ids=bad_words), 0).sequences[0]
    made.tokens.extend(output)
    return made


def banned(row: Row) -> set[int]:
    ids, values = additions(row)
    return {id for id, value in zip(ids.tolist(), values.tolist(), strict=True) if value == -math.inf}


def test_the_end_of_a_bad_word_is_banned_behind_its_beginning() -> None:
    words = ((7,), (1, 2, 8), (3, 9), (5, 5))
    assert banned(Row(sequence((), words))) == {7}  # the prompt does not count
    assert banned(Row(sequence((4, 1, 2), words))) == {7, 8}
    assert banned(Row(sequence((2,), words))) == {7}
    assert banned(Row(sequence((3,), words))) == {7, 9}
    drafted = sequence((1,), words)
    drafted.draft = array("i", (2, 5, 5))
    assert [banned(Row(drafted, offset)) for offset in range(4)] == [{7}, {7, 8}, {7, 5}, {7, 5}]


def test_additions_come_in_the_order_of_the_chain() -> None:
    made = sequence((1, 2), ((3,),), dry_multiplier=1.0, dry_base=2.0, logit_bias={3: 0.5, 6: 1.0}, min_tokens=9,
                    stop_token_ids=(6,))  # fmt: skip
    ids, values = additions(Row(made))
    got = list(zip(ids.tolist(), values.tolist(), strict=True))
    assert got == [(3, -1.0), (3, 0.5), (6, 1.0), (3, -math.inf), (6, -math.inf)]
