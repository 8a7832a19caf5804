"""How far one model's logits lie from another's, token by token, and what that comes to over a text.

The KL divergence of a token is sum p (log p - log q) in nats, p being the baseline's distribution over the vocabulary
and q the other's. Everything is computed in float64: divergences of 1e-6 are differences of numbers near 10.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]

NUM_RESAMPLES = 200
"""Of the bootstrap that gives quantiles their standard errors."""


@dataclass(frozen=True)
class Estimate:
    """A value over the tokens of a text and its standard error, tokens taken as independent."""

    value: float
    error: float


@dataclass(frozen=True)
class Tokens:
    """What a model makes of some tokens [n]: the surprisal of the token that comes (nats), the divergence from the
    baseline (nats), and whether both think the same token the likeliest."""

    surprisal: F64
    divergence: F64
    agrees: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Quality:
    """A model over a text, beside the baseline."""

    name: str
    num_tokens: int
    perplexity: Estimate
    mean_divergence: Estimate
    median_divergence: Estimate
    p99_divergence: Estimate
    agreement: Estimate


def log_softmax(logits: F32) -> F64:
    """[n, V] -> log-probabilities [n, V]."""
    x = logits.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    x -= np.log(np.exp(x).sum(axis=1, keepdims=True))
    return x


class Baseline:
    """The baseline's logits [n, V] over tokens whose successors are `targets` [n]; others are held against them."""

    def __init__(self, logits: F32, targets: I32) -> None:
        self._log = log_softmax(logits)
        self._probabilities = np.exp(self._log)
        self._best = logits.argmax(axis=1)
        self._targets = targets

    def measure(self, logits: F32) -> Tokens:
        """Another model's logits [n, V] over the same tokens."""
        log = log_softmax(logits)
        surprisal = -log[np.arange(len(log)), self._targets]
        divergence = np.einsum("nv,nv->n", self._probabilities, self._log - log)
        return Tokens(surprisal, divergence, logits.argmax(axis=1) == self._best)


def mean(values: npt.NDArray[Any]) -> Estimate:
    """Of values [n]."""
    spread = float(values.std(ddof=1)) if values.size > 1 else float("nan")
    return Estimate(float(values.mean()), spread / float(np.sqrt(values.size)))


def bootstrap(values: F64, statistic: Callable[..., Any]) -> Estimate:
    """`statistic(values, axis)` and its spread over resamples, the same ones at every call."""
    picks = np.random.default_rng(0).integers(0, values.size, (NUM_RESAMPLES, values.size))
    return Estimate(float(statistic(values, axis=0)), float(np.std(statistic(values[picks], axis=1))))


def summarise(name: str, parts: Sequence[Tokens]) -> Quality:
    """All of a text's tokens together."""
    divergence = np.concatenate([part.divergence for part in parts])
    surprisal = mean(np.concatenate([part.surprisal for part in parts]))
    perplexity = float(np.exp(surprisal.value))
    return Quality(
        name=name,
        num_tokens=divergence.size,
        perplexity=Estimate(perplexity, perplexity * surprisal.error),
        mean_divergence=mean(divergence),
        median_divergence=bootstrap(divergence, np.median),
        p99_divergence=bootstrap(divergence, lambda values, axis: np.quantile(values, 0.99, axis=axis)),
        agreement=mean(np.concatenate([part.agrees for part in parts])),
    )
