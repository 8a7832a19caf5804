"""The numbers of `pelton bench quality`, on distributions whose divergence is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pelton.bench.divergence import Baseline, Tokens, bootstrap, log_softmax, mean, summarise


def logits(*rows: tuple[float, ...]) -> np.ndarray:
    """Of distributions."""
    return (np.log(np.array(rows)) + np.arange(len(rows))[:, None]).astype(np.float32)


def test_log_softmax_of_huge_logits():
    got = log_softmax(np.array([[1e4, 1e4 + math.log(3), -1e4]], np.float32))
    np.testing.assert_allclose(got[0, :2], np.log([0.25, 0.75]), rtol=1e-3)
    assert got[0, 2] < -1e4


def test_a_model_beside_the_baseline():
    base = Baseline(logits((0.5, 0.25, 0.25), (0.1, 0.1, 0.8)), np.array([1, 2], np.int32))
    tokens = base.measure(logits((0.25, 0.5, 0.25), (0.1, 0.1, 0.8)))
    np.testing.assert_allclose(tokens.divergence, [0.25 * math.log(2), 0], atol=1e-6)
    np.testing.assert_allclose(tokens.surprisal, [math.log(2), -math.log(0.8)], atol=1e-6)
    assert tokens.agrees.tolist() == [False, True]


def test_tiny_divergences_are_not_lost_in_rounding():
    rng = np.random.default_rng(0)
    x = rng.normal(0, 3, (4, 5000)).astype(np.float32)
    noise = rng.normal(0, 1e-4, x.shape)
    tokens = Baseline(x, np.zeros(4, np.int32)).measure((x + noise).astype(np.float32))
    p = np.exp(log_softmax(x))
    variance = (p * noise**2).sum(1) - (p * noise).sum(1) ** 2  # the divergence, to second order in the noise
    np.testing.assert_allclose(tokens.divergence, variance / 2, rtol=1e-2)


def test_estimates():
    values = np.random.default_rng(1).normal(5, 2, 10_000)
    assert mean(values).value == pytest.approx(5, abs=0.1)
    assert mean(values).error == pytest.approx(0.02, rel=0.1)
    median = bootstrap(values, np.median)
    assert median.value == np.median(values)
    assert median.error == pytest.approx(0.02 * math.sqrt(math.pi / 2), rel=0.2)
    assert bootstrap(values, np.median) == median


def test_a_texts_tokens_together():
    parts = [
        Tokens(np.full(n, math.log(8)), np.full(n, d), np.full(n, a)) for n, d, a in ((30, 0.0, True), (10, 4, False))
    ]
    quality = summarise("name", parts)
    assert (quality.name, quality.num_tokens) == ("name", 40)
    assert quality.perplexity.value == pytest.approx(8)
    assert quality.perplexity.error == pytest.approx(0)
    assert (quality.mean_divergence.value, quality.median_divergence.value) == (1, 0)
    assert quality.p99_divergence.value == 4
    assert quality.agreement.value == 0.75
