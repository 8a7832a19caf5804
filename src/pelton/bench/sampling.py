"""Sampling from whole rows of logits, by what a request asks for.

Each logit must be read once at least, so sampling is limited by memory. In a step the logits of a few rows may still
be in a cache; here they come from memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pelton import _core
from pelton.bench.limits import Limits, measure
from pelton.bench.result import Result, judge
from pelton.ops.sampling import SampleArrays, Sampled, greedy_rows, no_samples

ZIPF_EXPONENT = 1.2
"""Probabilities fall as rank ** -1.2, about as a language's words do: what top-p costs depends on how many it keeps."""


@dataclass(frozen=True)
class Draw:
    """Parameters of all rows; temperature 0 is greedy."""

    name: str
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    num_logprobs: int = -1

    def arrays(self, num_rows: int) -> SampleArrays:
        """Rows that differ by output position alone."""
        base = greedy_rows(num_rows)
        return replace(
            base,
            temperature=base.temperature + np.float32(self.temperature),
            top_p=base.top_p * np.float32(self.top_p),
            top_k=base.top_k + np.int32(self.top_k),
            position=np.arange(num_rows, dtype=np.int32),
            num_logprobs=np.full(num_rows, self.num_logprobs, np.int32),
        )


DEFAULT_DRAWS = (
    Draw("greedy", temperature=0),
    Draw("greedy, 5 logprobs", temperature=0, num_logprobs=5),
    Draw("temperature 0.8"),
    Draw("top-k 50", top_k=50),
    Draw("top-p 0.95", top_p=0.95),
)


@dataclass(frozen=True)
class Sampling:
    """What to measure: each draw from each size of vocabulary."""

    vocab_sizes: Sequence[int] = (49_152, 151_936)
    draws: Sequence[Draw] = DEFAULT_DRAWS


def measure_vocabulary(
    sampling: Sampling, vocab_size: int, machine: _core.Machine, num_bytes: int, seconds: float, limits: Limits
) -> list[Result]:
    """Every draw, from logits of `num_bytes`. Times are of all rows together."""
    num_rows = max(1, num_bytes // (4 * vocab_size))
    ranks = 1 + np.random.default_rng(0).permutation(vocab_size)
    row = (-ZIPF_EXPONENT * np.log(ranks)).astype(np.float32)
    logits = np.stack([np.roll(row, 997 * r) for r in range(num_rows)])
    results = []
    for draw in sampling.draws:
        params = draw.arrays(num_rows)
        out = no_samples(num_rows, params)

        def run(params: SampleArrays = params, out: Sampled = out) -> None:
            _core.sample_alone(machine=machine, logits=logits, params=params, out=out)

        results.append(
            judge(
                "sampling",
                f"{vocab_size} ids, {draw.name}",
                num_rows,
                measure(run, seconds),
                num_bytes=logits.nbytes,
                operations=0,
                limits=limits,
                peak=None,
            )
        )
    return results
