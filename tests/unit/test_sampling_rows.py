"""Parameters of sequences -> rows of arrays."""

from __future__ import annotations

import math
from array import array

from pelton.engine.batch import Row
from pelton.engine.sampling import Sampling
from pelton.engine.sequence import Sequence, SequenceGroup
from tests.unit.toy_executor import request


def sequence(*output: int, prompt: tuple[int, ...] = (5, 3, 5), **params: object) -> Sequence:
    made = SequenceGroup(request("a", prompt, **params), 0).sequences[0]
    made.tokens.extend(output)
    return made


def entries(offsets, row, *columns):
    low, high = offsets[row : row + 2]
    return sorted(zip(*(column[low:high].tolist() for column in columns), strict=True))


def test_plain_rows_carry_nothing_and_are_made_once():
    rows = [Row(sequence()), Row(sequence(1))]
    sampling = Sampling(100)
    arrays = sampling.arrays(rows)
    assert arrays.temperature.tolist() == [0, 0]
    assert arrays.history_offsets.tolist() == arrays.bias_offsets.tolist() == [0, 0, 0]
    assert arrays.num_logprobs.tolist() == [-1, -1]
    rows[0].sequence.tokens.append(1)
    assert sampling.arrays(rows) is arrays
    again = sampling.arrays(list(rows))
    assert again.temperature is arrays.temperature
    assert (arrays.position.tolist(), again.position.tolist()) == ([0, 1], [1, 1])
    assert sampling.arrays(rows[:1]) is not arrays


def test_columns():
    params = {"temperature": 0.5, "top_p": 0.9, "min_p": 0.1, "top_k": 7, "seed": -1, "logprobs": 3}
    arrays = Sampling(100).arrays([Row(sequence()), Row(sequence(1, 2, **params))])
    assert arrays.temperature.tolist() == [0, 0.5]
    assert arrays.top_k.tolist() == [0, 7]
    assert arrays.seed.tolist() == [1, 2**64 - 1]
    assert arrays.position.tolist() == [0, 2]
    assert arrays.num_logprobs.tolist() == [-1, 3]


def test_positions_move_on():
    row = sequence(temperature=1.0)
    sampling = Sampling(100)
    for expected in range(3):
        assert sampling.arrays([Row(row)]).position.tolist() == [expected]
        row.tokens.append(9)


def test_repetition_looks_at_prompt_and_output_presence_at_the_output():
    rows = [sequence(7, 5, 7, repetition_penalty=1.5), sequence(), sequence(7, 7, presence_penalty=0.5)]
    sampling = Sampling(100)
    for _ in range(2):
        arrays = sampling.arrays(list(map(Row, rows)))
        assert entries(arrays.history_offsets, 0, arrays.history_ids, arrays.history_counts) == [(3, 0), (5, 1), (7, 2)]
        assert entries(arrays.history_offsets, 1, arrays.history_ids, arrays.history_counts) == []
        assert entries(arrays.history_offsets, 2, arrays.history_ids, arrays.history_counts) == [(7, 2)]
    rows[2].tokens.append(3)
    arrays = sampling.arrays(list(map(Row, rows)))
    assert entries(arrays.history_offsets, 2, arrays.history_ids, arrays.history_counts) == [(3, 1), (7, 2)]


def test_a_history_grows_past_its_first_room():
    row = sequence(*range(200), frequency_penalty=0.1)
    sampling = Sampling(100)
    sampling.arrays([Row(row)])
    row.tokens.extend(range(100, 400))
    arrays = sampling.arrays([Row(row)])
    got = entries(arrays.history_offsets, 0, arrays.history_ids, arrays.history_counts)
    assert got == [(id, 2 if 100 <= id < 200 else 1) for id in range(400)]


def test_end_tokens_are_banned_until_min_tokens():
    asked = {"min_tokens": 2, "stop_token_ids": (4,), "logit_bias": {4: 1.0, 6: -2.0}, "end_ids": (8,)}
    row, ignoring = sequence(**asked), sequence(**asked, ignore_eos=True)
    sampling = Sampling(100)
    for _ in range(2):
        arrays = sampling.arrays([Row(row), Row(ignoring)])
        got = entries(arrays.bias_offsets, 0, arrays.bias_ids, arrays.bias_values)
        assert got == [(4, -math.inf), (4, 1.0), (6, -2.0), (8, -math.inf)]
        got = entries(arrays.bias_offsets, 1, arrays.bias_ids, arrays.bias_values)
        assert got == [(4, -math.inf), (4, 1.0), (6, -2.0)]
        row.tokens.append(1)
        ignoring.tokens.append(1)
    arrays = sampling.arrays([Row(row), Row(ignoring)])
    assert entries(arrays.bias_offsets, 0, arrays.bias_ids, arrays.bias_values) == [(4, 1.0), (6, -2.0)]


def test_rows_of_a_draft_take_what_is_before_them_for_output():
    asked = {"min_tokens": 4, "end_ids": (8,), "temperature": 1.0, "repetition_penalty": 1.5}
    row = sequence(7, 5, **asked)
    sampling = Sampling(100)
    sampling.arrays([Row(row)])
    row.draft = array("i", [7, 9, 9])
    arrays = sampling.arrays([Row(row, offset) for offset in range(4)])
    assert arrays.position.tolist() == [2, 3, 4, 5]
    histories = [
        {3: 0, 5: 1, 7: 1},
        {3: 0, 5: 1, 7: 2},
        {3: 0, 5: 1, 7: 2, 9: 1},
        {3: 0, 5: 1, 7: 2, 9: 2},
    ]
    for offset, history in enumerate(histories):
        got = entries(arrays.history_offsets, offset, arrays.history_ids, arrays.history_counts)
        assert dict(got) == history
        row_as_output = sequence(7, 5, *row.draft[:offset], **asked)
        plain = Sampling(100).arrays([Row(row_as_output)])
        assert got == entries(plain.history_offsets, 0, plain.history_ids, plain.history_counts)
    bans = [entries(arrays.bias_offsets, offset, arrays.bias_ids, arrays.bias_values) for offset in range(4)]
    assert bans == [[(8, -math.inf)], [(8, -math.inf)], [], []]
    row.draft = array("i")
    arrays = sampling.arrays([Row(row)])
    assert dict(entries(arrays.history_offsets, 0, arrays.history_ids, arrays.history_counts)) == histories[0]
