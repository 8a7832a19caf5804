"""The plain definition of sampling: its generator against published answers, its filters against brute force."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from pelton.ops.sampling import BAD_LOGITS, NO_TOKEN, draw, greedy_rows, noise, philox, sample, waiting


def test_generator_gives_the_published_numbers() -> None:
    # Random123's kat_vectors, philox4x32 with 10 rounds, key and counter 0.
    assert philox(0, 0, 0, 0) == 0xE169C58D_6627E8D5


def test_draws_follow_the_distribution() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32))
    params = replace(greedy_rows(1), temperature=np.ones(1, np.float32))
    drawn = [draw(logits, replace(params, position=np.array([i], np.int32)), 0)[0] for i in range(4000)]
    counts = np.bincount(drawn, minlength=4)
    expected = 4000 * np.array([0.5, 0.25, 0.125, 0.125])
    assert ((counts - expected) ** 2 / expected).sum() < 16.3  # chi-square, 3 degrees, p = 0.001


def test_draws_with_one_key_agree_where_distributions_do() -> None:
    # Of two races with the same noise, at least (1 - d) / (1 + d) have one winner, d being the total variation: also
    # where tokens of low ids shift the running sums of all others.
    logits = np.log(np.array([[0.02, 0.3, 0.3, 0.2, 0.18], [0.22, 0.2, 0.2, 0.2, 0.18]], np.float32))
    params = replace(greedy_rows(1), temperature=np.ones(1, np.float32))
    pairs = []
    for i in range(2000):
        keyed = replace(params, position=np.array([i], np.int32))
        pairs.append([draw(row, keyed, 0)[0] for row in logits])
    first, second = np.array(pairs).T
    assert 0.8 / 1.2 - 0.03 < (first == second).mean() < 0.8 + 0.03


def test_waiting_times_are_those_of_an_exponential_distribution() -> None:
    words = np.array([0, 1, 2**16, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1], np.uint32)
    exact = [-math.log1p(-(int(word) + 0.5) / 2**32) for word in words]
    np.testing.assert_allclose(waiting(words), exact, rtol=1e-13)
    ids = np.arange(1 << 16)
    assert len(set(noise(ids, 0x0123456789ABCDEF).tolist())) == 1 << 16
    for bits in (0, 1, 1 << 40):  # a key's every bit changes all noise
        assert abs(waiting(noise(ids, bits)).mean() - 1) < 0.02
        flipped = np.bitwise_count(noise(ids, bits) ^ noise(ids, bits ^ 1 << 33))
        assert abs(flipped.mean() - 16) < 0.1


def test_filters_keep_what_they_say() -> None:
    logits = np.log(np.array([0.1, 0.4, 0.2, 0.2, 0.1], np.float32))
    warm = replace(greedy_rows(1), temperature=np.ones(1, np.float32))

    def kept(**changes: float) -> set[int]:
        arrays = {
            name: np.array([value], np.int32 if name == "top_k" else np.float32) for name, value in changes.items()
        }
        params = replace(warm, **arrays)  # type: ignore[arg-type]
        return {draw(logits, replace(params, seed=np.array([i], np.uint64)), 0)[0] for i in range(300)}

    assert kept() == {0, 1, 2, 3, 4}
    assert kept(top_k=2) == {1, 2}
    assert kept(top_p=0.59) == {1, 2}
    assert kept(top_p=0.0) == {1}
    assert kept(min_p=0.45) == {1, 2, 3}
    assert kept(top_k=3, top_p=0.45) == {1}
    assert kept(temperature=1e-6) == {1}


def test_penalties_bias_and_masks_in_order() -> None:
    logits = np.array([[2.0, -1.0, 1.5, 0.0]], np.float32)
    params = replace(
        greedy_rows(1),
        repetition=np.array([2.0], np.float32),
        presence=np.array([0.25], np.float32),
        frequency=np.array([0.5], np.float32),
        history_offsets=np.array([0, 2], np.int32),
        history_ids=np.array([0, 1], np.int32),
        history_counts=np.array([3, 0], np.int32),
        num_logprobs=np.array([1], np.int32),
    )
    out = sample(logits, params)
    assert out.ids[0] == 2  # 2.0 / 2 - 0.25 - 1.5 is negative
    assert out.top_ids[0, 0] == 0  # logprobs are of the raw distribution
    assert out.logprobs[0] == pytest.approx(out.top_logprobs[0, 0] - 0.5)
    banned = replace(
        params,
        bias_offsets=np.array([0, 1], np.int32),
        bias_ids=np.array([2], np.int32),
        bias_values=np.array([-np.inf], np.float32),
    )
    assert sample(logits, banned).ids[0] == 3
    masked = replace(banned, masks=np.array([[0b0011]], np.uint32), mask_rows=np.array([0], np.int32))
    assert sample(logits, masked).ids[0] == 0  # -0.75 against -2.0


def test_rows_that_cannot_draw_say_so() -> None:
    logits = np.array([[0, np.nan], [np.inf, 0], [-np.inf, -np.inf], [1, 2]], np.float32)
    params = replace(greedy_rows(4), masks=np.zeros((1, 1), np.uint32), mask_rows=np.array([-1, -1, -1, 0], np.int32))
    assert sample(logits, params).errors.tolist() == [BAD_LOGITS, BAD_LOGITS, BAD_LOGITS, NO_TOKEN]
