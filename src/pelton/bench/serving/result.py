"""From the times of single requests to a load's figures."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields

from pelton.errors import InvalidRequest


@dataclass(frozen=True)
class Sample:
    """One request's times, in seconds from when it was to be sent; counts are the server's. `error`: "" for none,
    and then all of them hold."""

    end: float
    ttft: float = 0.0
    last: float = 0.0
    """When the last text came."""
    gaps: Sequence[float] = ()
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_output_tokens: int = 0
    error: str = ""

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first; None where there is none."""
        rest = self.num_output_tokens - 1
        return (self.last - self.ttft) / rest if rest > 0 else None


@dataclass(frozen=True)
class Quantiles:
    """Of some values; the percentiles are the nearest rank: the least value that so many of all do not exceed."""

    median: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Quantiles | None:
        """None for no values."""
        ordered = sorted(values)
        if not ordered:
            return None
        return cls(statistics.median(ordered), _rank(ordered, 0.95), _rank(ordered, 0.99))


def _rank(ordered: Sequence[float], share: float) -> float:
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


@dataclass(frozen=True)
class Objective:
    """What one request must keep to be good (its SLO), in seconds: its first token, its mean time per token, the 99th
    percentile of its gaps (of fewer than 100: the longest) and its end. None: any."""

    ttft: float | None = None
    tpot: float | None = None
    itl: float | None = None
    e2e: float | None = None

    @classmethod
    def parse(cls, text: str) -> Objective:
        """From "ttft=500,itl=50", in milliseconds."""
        names = [field.name for field in fields(cls)]
        bounds: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.partition("=")
            try:
                bounds[name] = float(value) / 1000
            except ValueError:
                raise InvalidRequest(f"{part!r} is not a bound in milliseconds (ttft=500)") from None
            if name not in names or not bounds[name] > 0:
                raise InvalidRequest(f"{part!r} is no bound over 0 on one of {', '.join(names)}")
        return cls(**bounds)

    def is_met(self, sample: Sample) -> bool:
        """Is the request good?"""
        if sample.error:
            return False
        longest = _rank(sorted(sample.gaps), 0.99) if sample.gaps else None
        values = (sample.ttft, sample.tpot, longest, sample.end)
        bounds = (self.ttft, self.tpot, self.itl, self.e2e)
        return all(v is None or b is None or v <= b for v, b in zip(values, bounds, strict=True))


@dataclass(frozen=True)
class Result:
    """A load's figures. Times are in seconds; failed requests count in none but `num_requests`, `failures` and, as
    not good, in the goodput."""

    num_requests: int
    seconds: float
    tokens_per_second: float
    """Of output."""
    requests_per_second: float
    goodput: float | None
    """Good requests per second; None without an objective."""
    good_share: float | None
    num_output_tokens: int
    num_prompt_tokens: int | None
    """None where the server does not tell; so with the cached ones among them."""
    num_cached_tokens: int | None
    ttft: Quantiles | None
    tpot: Quantiles | None
    itl: Quantiles | None
    e2e: Quantiles | None
    max_in_flight: int
    client_share: float
    """Of this machine's cores' time that the client took."""
    failures: dict[str, int] = field(default_factory=dict)
    """How often each error came."""

    @property
    def num_failed(self) -> int:
        """Requests."""
        return sum(self.failures.values())

    def weights_read(self, weight_bytes: int) -> float:
        """Bytes of weights per second that these tokens took to read at least, each step giving every request in
        flight one token (without speculation)."""
        return self.tokens_per_second / max(1, self.max_in_flight) * weight_bytes


def summarise(
    samples: Sequence[Sample], seconds: float, max_in_flight: int, client_share: float, objective: Objective | None
) -> Result:
    """The figures of a load that took so long."""
    good = [sample for sample in samples if not sample.error]
    num_met = None if objective is None else sum(objective.is_met(sample) for sample in samples)
    num_tokens = sum(sample.num_output_tokens for sample in good)
    return Result(
        num_requests=len(samples),
        seconds=seconds,
        tokens_per_second=num_tokens / seconds,
        requests_per_second=len(good) / seconds,
        goodput=None if num_met is None else num_met / seconds,
        good_share=None if num_met is None else num_met / len(samples),
        num_output_tokens=num_tokens,
        num_prompt_tokens=_sum(sample.num_prompt_tokens for sample in good),
        num_cached_tokens=_sum(sample.num_cached_tokens for sample in good),
        ttft=Quantiles.of(sample.ttft for sample in good),
        tpot=Quantiles.of(tpot for sample in good if (tpot := sample.tpot) is not None),
        itl=Quantiles.of(gap for sample in good for gap in sample.gaps),
        e2e=Quantiles.of(sample.end for sample in good),
        max_in_flight=max_in_flight,
        client_share=client_share,
        failures=dict(Counter(sample.error for sample in samples if sample.error).most_common()),
    )


def _sum(counts: Iterable[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None
