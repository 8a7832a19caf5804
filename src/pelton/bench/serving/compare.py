"""Several servers in one run: every round puts every load on every server in turn, so that a slow phase of the
machine falls on all of them alike. Figures are medians over the rounds, ratios medians of the rounds' ratios."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pelton.bench.serving.drive import drive
from pelton.bench.serving.load import Load
from pelton.bench.serving.result import Objective, Quantiles, Result
from pelton.bench.serving.target import Target

Get = Callable[["Row"], float | None]


@dataclass(frozen=True)
class Row:
    """One load on one server in one round. `read_limit`: bytes per second that this machine reads; None: the server
    is elsewhere."""

    target: Target
    load: Load
    round: int
    result: Result
    read_limit: float | None

    @property
    def key(self) -> tuple[str, str, bool | None]:
        """The same in every round: server, level, and whether system prompts are shared (None: there are none)."""
        systems = self.load.systems
        return self.target.name, self.load.level, None if systems is None else systems.is_shared

    @property
    def label(self) -> str:
        """The server, and whether it is asked with shared system prompts or with ones of each request's own."""
        return self.target.name + {None: "", True: ", shared", False: ", own"}[self.key[2]]

    @property
    def weights_read(self) -> float | None:
        """Bytes of weights per second."""
        size = self.target.weight_bytes
        return None if size is None or not self.result.num_output_tokens else self.result.weights_read(size)

    @property
    def share(self) -> float | None:
        """Of the limit."""
        return self.weights_read and self.read_limit and self.weights_read / self.read_limit


def time_of(metric: str, quantile: str = "median") -> Get:
    """Reads one of a row's times, in milliseconds: a quantile of "ttft", "tpot", "itl" or "e2e"."""

    def get(row: Row) -> float | None:
        quantiles: Quantiles | None = getattr(row.result, metric)
        return None if quantiles is None else 1000 * float(getattr(quantiles, quantile))

    return get


TIMES = ("ttft", "tpot", "itl", "e2e")
METRICS: dict[str, Get] = {
    "tokens_per_second": lambda row: row.result.tokens_per_second,
    **{metric: time_of(metric) for metric in TIMES},
}
"""What is compared."""


@dataclass(frozen=True)
class Ratio:
    """How many times as good `ours` is as `theirs` at one level: over 1 is faster, in tokens per second and in each
    time. None: one of them has no figure."""

    level: str
    ours: str
    theirs: str
    factors: dict[str, float | None]


async def run(
    targets: Sequence[Target],
    loads: Sequence[Load],
    num_rounds: int,
    read_limit: float | None,
    *,
    objective: Objective | None = None,
    timeout: float = 600,
    tell: Callable[[str], None],
) -> list[Row]:
    """Every load on every target in every round; every other round takes the targets the other way round. The
    prompts are sized as the first target counts, so that all get the same, and new ones in each round."""
    rows = []
    for number in range(num_rounds):
        for index, load in enumerate(loads):
            fresh = replace(load, seed=(load.seed * 1009 + number) * 1009 + index)
            for target in targets if number % 2 == 0 else list(reversed(targets)):
                tell(f"round {number + 1} of {num_rounds}, {load.level}: {load.num_requests} requests to {target.name}")
                result = await drive(target, fresh, counting=targets[0].counting, objective=objective, timeout=timeout)
                rows.append(Row(target, load, number, result, read_limit if target.address.is_here else None))
    return rows


def grouped(rows: Iterable[Row]) -> list[list[Row]]:
    """The rounds of each load on each server, levels in their order and servers in the first round's."""
    groups: dict[tuple[str, str, bool | None], list[Row]] = {}
    for row in rows:
        groups.setdefault(row.key, []).append(row)
    return list(groups.values())


def median(rows: Iterable[Row], get: Get) -> float | None:
    """Over the rounds that have the figure."""
    values = [value for row in rows if (value := get(row)) is not None]
    return statistics.median(values) if values else None


def ratios(rows: Sequence[Row]) -> list[Ratio]:
    """The first server to each other one; and on each server shared system prompts to others."""
    groups = {group[0].key: group for group in grouped(rows)}
    first = next(iter(groups))[0]
    pairs = [(groups[first, *key[1:]], group) for key, group in groups.items() if key[0] != first]
    pairs += [(group, groups[name, level, False]) for (name, level, is_shared), group in groups.items() if is_shared]
    return [_ratio(*pair) for pair in pairs]


def _ratio(ours: Sequence[Row], theirs: Sequence[Row]) -> Ratio:
    factors: dict[str, float | None] = {}
    for metric, get in METRICS.items():
        pairs = [(get(a), get(b)) for a, b in zip(ours, theirs, strict=True)]
        known = [(a, b) for a, b in pairs if a and b]
        each = [b / a if metric in TIMES else a / b for a, b in known]
        factors[metric] = statistics.median(each) if each else None
    return Ratio(ours[0].load.level, ours[0].label, theirs[0].label, factors)


def warnings(rows: Sequence[Row]) -> list[str]:
    """What a reader of the figures must know: what failed, and who counted otherwise."""
    lines = []
    for target in {row.target.name: row.target for row in rows}.values():
        if not target.has_usage:
            lines.append(
                f"{target.name}: its streams say no usage; an answer that it ended by length counts as that length"
            )
    for group in grouped(rows):
        name, level, _ = group[0].key
        failures: dict[str, int] = {}
        for row in group:
            for error, count in row.result.failures.items():
                failures[error] = failures.get(error, 0) + count
        for error, count in sorted(failures.items(), key=lambda item: -item[1])[:3]:
            lines.append(f"{name}, {level}: {count} requests failed with: {error}")
        lines += _miscounted(group)
    return lines


def _miscounted(group: Sequence[Row]) -> list[str]:
    """Do the prompts, by the server's usage, have another length than was asked for?"""
    first = group[0]
    asked = sum(ask.num_prompt_tokens + ask.num_system_tokens for ask in first.load.asks())
    counted = first.result.num_prompt_tokens
    if counted is None or first.result.failures or abs(counted / asked - 1) <= 0.02:
        return []
    mean = counted / first.result.num_requests
    return [
        f"{first.target.name}, {first.load.level}: prompts were to have {asked / first.result.num_requests:.0f} tokens "
        f"on average, and have {mean:.0f} as this server counts"
    ]


def flat(row: Row) -> dict[str, Any]:
    """A row as one object of JSON: docs/benchmarking.md lists its keys."""
    target, load = row.target, row.load
    return {
        "server": target.name,
        "url": target.address.url,
        "model": target.model,
        "endpoint": target.endpoint,
        "weight_bytes": target.weight_bytes,
        "counted_by": "usage" if target.has_usage else "length",
        "round": row.round,
        **{key: value for key, value in asdict(load).items() if key not in ("num_requests", "num_warm_up")},
        **asdict(row.result),
        "weights_read": row.weights_read,
        "read_limit": row.read_limit,
        "share": row.share,
    }
