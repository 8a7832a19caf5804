"""The numbers of `pelton bench quality`, on distributions whose divergence is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pelton.bench.divergence import Baseline, Tokens, bootstrap, mean, summarise


def logits(*rows: tuple[float, ...]) -> np.ndarray:
    """Of distributions."""
    return (np.log(np.array(rows)) + np.arange(len(rows))[:, None]).astype(np.float32)


def test_a_model_beside_the_baseline():
    base = Baseline(logits((0.5, 0.25, 0.25), (0.1, 0.1, 0.8)), np.array([1, 2], np.int32))
    tokens = base.measure(logits((0.25, 0.5, 0.25), (0.1, 0.1, 0.8)))
    np.testing.assert_allclose(tokens.divergence, [0.25 * math.log(2), 0], atol=1e-6)
    np.testing.assert_allclose(tokens.surprisal, [math.log(2), -math.log(0.8)], atol=1e-6)
    assert tokens.agrees.tolist() == [False, True]


def log_softmax(x: np.ndarray) -> np.ndarray:
    wide = x.astype(np.float64)
    return wide - np.log(np.exp(wide - wide.max()).sum(axis=1, keepdims=True)) - wide.max()


@pytest.mark.parametrize("noise", [1e-3, 0.1, 3.0])
def test_divergences_small_and_large(noise: float):
    """Against the definition in float64; the other's logits also stand elsewhere."""
    rng = np.random.default_rng(0)
    x = rng.normal(0, 3, (4, 5000)).astype(np.float32)
    y = (x + rng.normal(0, noise, x.shape) + 7).astype(np.float32)
    tokens = Baseline(x, np.arange(4, dtype=np.int32)).measure(y)
    log_p, log_q = log_softmax(x), log_softmax(y)
    np.testing.assert_allclose(tokens.divergence, (np.exp(log_p) * (log_p - log_q)).sum(axis=1), rtol=1e-3, atol=1e-7)
    np.testing.assert_allclose(tokens.surprisal, -log_q[np.arange(4), np.arange(4)], rtol=1e-6)


def test_the_baseline_has_no_distance_from_itself():
    x = np.random.default_rng(0).normal(0, 30, (9, 1000)).astype(np.float32)
    tokens = Baseline(x, np.zeros(9, np.int32)).measure(x)
    assert not tokens.divergence.any()
    assert tokens.agrees.all()


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
