"""Sampling in the core against its definition, and its bits against themselves."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pelton import _core
from pelton.ops.sampling import (
    BAD_LOGITS,
    NO_TOKEN,
    SampleArrays,
    Sampled,
    greedy_rows,
    log_softmax,
    no_samples,
    sample,
)

F32 = npt.NDArray[np.float32]
ISAS = _core.isas()
LISTS = ("history_ids", "history_counts", "bias_ids", "bias_values", "masks", "mask_rows")


@functools.cache
def machine(isa: str, threads: int) -> _core.Machine:
    return _core.Machine(isa, threads)


def parameters(num_rows: int, **changes: Any) -> SampleArrays:
    """Rows at temperature 1 that differ by position; a number or a list for every row."""
    base = greedy_rows(num_rows)
    given = {"temperature": 1, "seed": 7, "position": np.arange(num_rows)} | changes
    for name, value in given.items():
        if name not in LISTS:
            like = getattr(base, name)
            given[name] = np.ascontiguousarray(np.broadcast_to(np.asarray(value), like.shape).astype(like.dtype))
    return replace(base, **given)


def in_core(logits: F32, params: SampleArrays, threads: int = 1, isa: str = "") -> Sampled:
    out = no_samples(len(logits), params)
    _core.sample_alone(machine=machine(isa, threads), logits=np.ascontiguousarray(logits), params=params, out=out)
    return out


def assert_same_bits(a: Sampled, b: Sampled) -> None:
    for name, values in a._asdict().items():
        assert np.array_equal(values, getattr(b, name)), name


def random_logits(num_rows: int, vocab: int, spread: float = 3, seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal((num_rows, vocab), np.float32) * np.float32(spread)


def everything(num_rows: int, vocab: int) -> SampleArrays:
    """A different mix of parameters in each row."""
    rng = np.random.default_rng(5)

    def pick(*values: float) -> npt.NDArray[np.float64]:
        return rng.choice(np.array(values), num_rows)

    history = [rng.choice(vocab, rng.integers(0, 40), replace=False) for _ in range(num_rows)]
    bias = [rng.choice(vocab, rng.integers(0, 10), replace=False) for _ in range(num_rows)]
    num_bias = sum(map(len, bias))
    return parameters(
        num_rows,
        targets=np.where(rng.random(num_rows) < 0.2, rng.integers(0, vocab, num_rows), -1),
        temperature=pick(0, 0.3, 0.8, 1, 1.7),
        top_p=pick(1, 0.95, 0.5, 0.999),
        min_p=pick(0, 0, 0.05, 0.3),
        top_k=pick(0, 1, 20, 50, 1000, 10**6),
        typical_p=pick(1, 1, 0.9, 0.3),
        top_n_sigma=pick(0, 0, 1, 2.5),
        xtc_probability=pick(0, 0, 0.5, 1),
        xtc_threshold=pick(0.1, 0.01),
        mirostat_tau=pick(0, 0, 3, 5),
        mirostat_eta=pick(0.1, 0.5),
        mirostat_mu=pick(6, 10, 0.5),
        chain=pick(0, 0, 1),
        seed=rng.integers(0, 2**63, num_rows),
        choice=pick(0, 1, 2),
        repetition=pick(1, 1.1, 1.3),
        presence=pick(0, 0.5, -0.5),
        frequency=pick(0, 0.2),
        num_logprobs=pick(-1, 0, 5, 20),
        history_offsets=np.cumsum([0, *map(len, history)], dtype=np.int32),
        history_ids=np.concatenate(history).astype(np.int32),
        history_counts=rng.integers(0, 4, sum(map(len, history))).astype(np.int32),
        bias_offsets=np.cumsum([0, *map(len, bias)], dtype=np.int32),
        bias_ids=np.concatenate(bias).astype(np.int32),
        bias_values=np.where(rng.random(num_bias) < 0.3, -np.inf, rng.normal(0, 3, num_bias)).astype(np.float32),
        masks=rng.integers(0, 2**32, (3, -(-vocab // 32)), dtype=np.uint32),
        mask_rows=pick(-1, -1, 0, 1, 2).astype(np.int32),
    )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("vocab", [40, 257, 5000, 49152])
@pytest.mark.parametrize("spread", [0.2, 3.0])
def test_equals_the_definition(vocab: int, spread: float, isa: str) -> None:
    rows = 60
    logits = random_logits(rows, vocab, spread)
    params = everything(rows, vocab)
    out, expected = in_core(logits, params, 2, isa), sample(logits, params)
    assert np.array_equal(out.errors, expected.errors)
    assert np.array_equal(out.ids, expected.ids)
    assert np.array_equal(out.top_ids, expected.top_ids)
    np.testing.assert_allclose(out.logprobs, expected.logprobs, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(out.top_logprobs, expected.top_logprobs, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(out.mu, expected.mu, rtol=1e-6, atol=1e-5)


def test_threads_and_company_give_the_same_bits() -> None:
    rows, vocab = 24, 12345
    logits, params = random_logits(rows, vocab), everything(rows, vocab)
    together = in_core(logits, params)
    for threads in (2, 3, 5):
        assert_same_bits(in_core(logits, params, threads), together)
    order = np.random.default_rng(1).permutation(rows)
    plain = parameters(rows, temperature=0.7, top_p=0.9, num_logprobs=3)
    shuffled = replace(plain, position=np.ascontiguousarray(plain.position[order]))
    assert np.array_equal(in_core(logits[order], shuffled).ids, in_core(logits, plain).ids[order])


def test_instruction_sets_agree() -> None:
    # Weights are integers and sums of them exact; only a logit at the edge of a rounding could tell sets apart.
    logits = random_logits(40, 3000)
    params = everything(40, 3000)
    first = in_core(logits, params, isa=ISAS[0])
    for isa in ISAS[1:]:
        assert np.array_equal(in_core(logits, params, isa=isa).ids, first.ids)


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, range(12)),
        ({"temperature": 0.5}, range(12)),
        ({"top_k": 4}, range(4)),
        ({"top_p": 0.8}, None),
        ({"min_p": 0.2}, None),
        ({"top_k": 6, "top_p": 0.7, "temperature": 1.5}, None),
    ],
)
def test_draws_follow_the_distribution(changes: dict[str, float], kept: range | None) -> None:
    draws, vocab = 20000, 700
    logits = np.full(vocab, -200, np.float32)
    places = np.random.default_rng(3).permutation(vocab)[:12]
    logits[places] = -0.4 * np.arange(12, dtype=np.float32)
    out = in_core(np.tile(logits, (draws, 1)), parameters(draws, **changes), 2)
    probabilities = np.exp(logits[places].astype(np.float64) / changes.get("temperature", 1))
    if "top_k" in changes:
        probabilities[int(changes["top_k"]) :] = 0
    probabilities /= probabilities.sum()
    if "top_p" in changes:
        probabilities[np.searchsorted(probabilities.cumsum(), changes["top_p"]) + 1 :] = 0
    if "min_p" in changes:
        probabilities[probabilities < changes["min_p"] * probabilities[0]] = 0
    expected = draws * probabilities / probabilities.sum()
    counts = np.bincount(out.ids, minlength=vocab)[places]
    assert counts.sum() == draws
    if kept is not None:
        assert set(np.flatnonzero(counts)) == set(kept)
    assert (counts[expected == 0] == 0).all()
    likely = expected > 0
    chi_square = ((counts[likely] - expected[likely]) ** 2 / expected[likely]).sum()
    assert chi_square < likely.sum() - 1 + 5 * np.sqrt(2 * likely.sum())


def test_keys_give_draws_that_differ_and_repeat() -> None:
    logits = np.zeros((64, 1000), np.float32)
    base = in_core(logits, parameters(64)).ids
    assert len(set(base.tolist())) > 55
    assert np.array_equal(in_core(logits, parameters(64)).ids, base)
    for other in ({"seed": 8}, {"choice": 1}, {"position": np.arange(64) + 1000}):
        assert (in_core(logits, parameters(64, **other)).ids == base).mean() < 0.1
    assert np.array_equal(in_core(logits[:63], parameters(63, position=np.arange(1, 64))).ids, base[1:])


def test_ties_go_to_the_lowest_id() -> None:
    logits = np.zeros((3, 3000), np.float32)
    logits[:, [2900, 700, 1300]] = 1
    params = parameters(3, temperature=[0, 1, 1], top_k=[0, 1, 0], top_p=[1, 1, 0], num_logprobs=5)
    out = in_core(logits, params)
    assert out.ids.tolist() == [700, 700, 700]
    assert out.top_ids.tolist() == [[700, 1300, 2900, 0, 1]] * 3


@pytest.mark.parametrize("isa", ISAS)
def test_rows_that_cannot_draw_say_so(isa: str) -> None:
    vocab = 1003
    logits = random_logits(6, vocab)
    logits[0, 1001] = np.nan
    logits[1, 5] = np.inf
    logits[2] = -np.inf
    logits[4, 7:] = -np.inf
    params = parameters(
        6,
        temperature=[0, 1, 1, 1, 1, 1],
        top_k=[0, 0, 0, 0, 9, 0],
        num_logprobs=2,
        masks=np.zeros((1, 32), np.uint32),
        mask_rows=np.array([-1, -1, -1, 0, -1, -1], np.int32),
    )
    out = in_core(logits, params, isa=isa)
    assert out.errors.tolist() == [BAD_LOGITS, BAD_LOGITS, BAD_LOGITS, NO_TOKEN, 0, 0]
    assert out.ids[:4].tolist() == [0] * 4
    assert out.ids[4] < 7
    assert ((out.ids >= 0) & (out.ids < vocab)).all()


@pytest.mark.parametrize("isa", ISAS)
def test_logits_that_penalties_enlarge_beyond_all_numbers_say_so(isa: str) -> None:
    logits = random_logits(3, 300)
    logits[:2, 7] = 2e38
    params = parameters(
        3,
        temperature=1,
        repetition=[0.1, 0.1, 1],
        history_offsets=np.array([0, 1, 2, 2], np.int32),
        history_ids=np.array([7, 7], np.int32),
        history_counts=np.zeros(2, np.int32),
        bias_offsets=np.array([0, 0, 1, 1], np.int32),
        bias_ids=np.array([7], np.int32),
        bias_values=np.array([-np.inf], np.float32),
    )
    assert sample(logits, params).errors.tolist() == [BAD_LOGITS, BAD_LOGITS, 0]
    assert in_core(logits, params, isa=isa).errors.tolist() == [BAD_LOGITS, BAD_LOGITS, 0]


def test_a_target_is_scored_instead_of_a_draw() -> None:
    logits = random_logits(3, 300)
    logits[2, 9] = np.nan
    nothing = np.zeros((1, 10), np.uint32)
    params = parameters(3, targets=[5, 299, 1], num_logprobs=[0, 2, 2], masks=nothing, mask_rows=np.zeros(3, np.int32))
    out = in_core(logits, params)
    assert out.errors.tolist() == [0, 0, BAD_LOGITS]
    assert out.ids.tolist() == [5, 299, 0]
    expected = log_softmax(logits[1])
    assert out.logprobs[1] == pytest.approx(expected[299], abs=2e-6)
    assert out.top_ids[1].tolist() == np.argsort(-logits[1])[:2].tolist()
    assert out.top_ids[0].tolist() == [0, 0]


def test_arrays_of_a_wrong_type_or_shape_are_refused() -> None:
    logits = random_logits(2, 100)
    params = parameters(2)
    with pytest.raises(RuntimeError):
        in_core(logits, replace(params, temperature=np.ones(2, np.float64)))
    with pytest.raises(ValueError, match="top_p"):
        in_core(logits, replace(params, top_p=np.ones(1, np.float32)))
    with pytest.raises(ValueError, match="masks"):
        in_core(logits, replace(params, masks=np.zeros((1, 3), np.uint32), mask_rows=np.zeros(2, np.int32)))
