"""How far one model's logits lie from another's, token by token, and what that comes to over a text.

The KL divergence of a token is sum p (log p - log q) in nats, p being the baseline's distribution over the vocabulary
and q the other's.
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


class Baseline:
    """The baseline's logits [n, V] over tokens whose successors are `targets` [n]; others are held against them.

    With d the other's logits less the baseline's and <> the mean under the baseline's p, the divergence is
    log <exp(d - <d>)>: in float32, with sums in float64, to about 1e-7.
    """

    def __init__(self, logits: F32, targets: I32) -> None:
        self._logits = logits
        self._targets = targets
        largest = logits.max(axis=1, keepdims=True)
        self._weights = np.exp(logits - largest)
        self._total = _sum(self._weights)
        self._log_total = largest[:, 0] + np.log(self._total)

    def measure(self, logits: F32) -> Tokens:
        """Another model's logits [n, V] over the same tokens."""
        difference = logits - self._logits
        mean = _sum(self._weights * difference) / self._total
        rounded = mean.astype(np.float32)
        growth = _sum(self._weights * np.exp(difference - rounded[:, None])) / self._total
        log_growth = rounded + np.log(growth)  # of the sum of exp(logits)
        surprisal = self._log_total + log_growth - logits[np.arange(len(logits)), self._targets]
        return Tokens(surprisal, log_growth - mean, logits.argmax(axis=1) == self._logits.argmax(axis=1))


def _sum(values: F32) -> F64:
    """Of each row, in float64."""
    total: F64 = values.sum(axis=1, dtype=np.float64)
    return total


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
