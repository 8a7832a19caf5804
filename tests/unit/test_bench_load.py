"""What `pelton bench serve` asks, and how it makes figures of the answers: drawn and computed without any server."""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import replace

import pytest

from pelton.bench.serving import compare, plot
from pelton.bench.serving.http import Address
from pelton.bench.serving.load import Lengths, Load, Systems
from pelton.bench.serving.result import Objective, Quantiles, Result, Sample, summarise
from pelton.bench.serving.target import Target
from pelton.bench.serving.words import WORDS, Counting, text
from pelton.errors import InvalidRequest

MIXED = Load(None, 4.0, 4000, Lengths(32, 512), Lengths(1, 1), seed=3)
SAMPLE = Sample(end=2.0, ttft=0.4, last=1.9, gaps=[0.1] * 98 + [0.2, 0.9], num_output_tokens=16)


def test_mixed_lengths_are_log_uniform() -> None:
    lengths = [ask.num_prompt_tokens for ask in MIXED.asks()]
    assert (min(lengths), max(lengths)) == (32, 512)
    octaves = [sum(low <= n < 2 * low for n in lengths) / len(lengths) for low in (32, 64, 128, 256)]
    assert octaves == pytest.approx([0.25] * 4, abs=0.03)
    assert {ask.num_output_tokens for ask in MIXED.asks()} == {1}


def test_arrivals_are_those_of_a_poisson_process() -> None:
    arrivals = [ask.arrival for ask in MIXED.asks()]
    gaps = [b - a for a, b in itertools.pairwise(arrivals)]
    assert arrivals[0] == 0
    assert statistics.mean(gaps) == pytest.approx(1 / 4, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(1 / 4, rel=0.08)
    assert sum(gap > 1 / 4 for gap in gaps) / len(gaps) == pytest.approx(1 / math.e, abs=0.03)


def test_a_seed_draws_the_same_and_another_one_does_not() -> None:
    assert MIXED.asks() == MIXED.asks()
    other = replace(MIXED, seed=4).asks()
    assert [ask.arrival for ask in other] != [ask.arrival for ask in MIXED.asks()]
    assert {ask.seed for ask in other}.isdisjoint({ask.seed for ask in MIXED.asks()})


def test_levels_draw_the_same_lengths_shared_or_not() -> None:
    shared, own = (replace(MIXED, systems=Systems(3, 64, is_shared)).asks() for is_shared in (True, False))
    assert [a.num_output_tokens for a in shared] == [a.num_output_tokens for a in own]
    assert len({ask.system_seed for ask in shared}) == 3
    assert len({ask.system_seed for ask in own}) == len(own)


@pytest.mark.parametrize("bad", ["", "x", "0", "5-4", "1-", "-3", "1-2-3"])
def test_lengths_that_are_none(bad: str) -> None:
    with pytest.raises(InvalidRequest):
        Lengths.parse(bad)


@pytest.mark.parametrize("bad", ["", "4", "4x", "0x3", "3x0", "axb"])
def test_systems_that_are_none(bad: str) -> None:
    with pytest.raises(InvalidRequest, match="system prompts"):
        Systems.parse(bad)


def test_words() -> None:
    assert len(set(WORDS)) == len(WORDS) > 400
    assert len(text("s", 100).split()) == 100
    assert text("s", 100) == text("s", 100) != text("t", 100)


@pytest.mark.parametrize(("per_prompt", "per_word"), [(0, 1.0), (12, 1.0), (3, 1.5)])
def test_words_for_a_number_of_tokens(per_prompt: int, per_word: float) -> None:
    counts = [(n, int(per_prompt + n * per_word)) for n in (8, 72)]
    counting = Counting.fitted(*counts)
    assert per_prompt + per_word * counting.num_words(512) == pytest.approx(512, abs=per_word)
    assert per_word * counting.num_words_inside(300) == pytest.approx(300, abs=per_word)
    assert counting.num_words(1) == 1


def test_percentiles_are_the_nearest_rank() -> None:
    assert Quantiles.of(range(1, 101)) == Quantiles(50.5, 95, 99)
    assert Quantiles.of([3, 1, 2]) == Quantiles(2, 3, 3)
    assert Quantiles.of([]) is None


@pytest.mark.parametrize(
    ("bounds", "is_good"),
    [
        ("ttft=400", True),
        ("ttft=399", False),
        ("tpot=100", True),  # 1.5 s for 15 tokens
        ("tpot=99", False),
        ("itl=200", True),  # one gap in a hundred may be longer
        ("itl=199", False),
        ("e2e=2000,ttft=400", True),
        ("e2e=1999,ttft=400", False),
    ],
)
def test_what_is_good(bounds: str, is_good: bool) -> None:
    assert Objective.parse(bounds).is_met(SAMPLE) is is_good


def test_a_lone_token_has_no_time_per_token() -> None:
    lone = Sample(end=1.0, ttft=0.5, last=0.5, num_output_tokens=1)
    assert lone.tpot is None
    assert Objective.parse("tpot=1,itl=1").is_met(lone)


@pytest.mark.parametrize("bad", ["", "ttft", "ttft=", "ttft=x", "ttft=0", "ttft=nan", "itl=-1", "speed=3", "ttft=1;"])
def test_objectives_that_are_none(bad: str) -> None:
    with pytest.raises(InvalidRequest):
        Objective.parse(bad)


def test_goodput_counts_failures_as_not_good() -> None:
    samples = [SAMPLE, replace(SAMPLE, ttft=0.6), SAMPLE, Sample(end=0.1, error="503"), Sample(end=0.1, error="503")]
    result = summarise(samples, 4.0, 2, 0.1, Objective(ttft=0.5))
    assert (result.goodput, result.good_share) == (2 / 4.0, 2 / 5)
    assert (result.requests_per_second, result.tokens_per_second) == (3 / 4.0, 3 * 16 / 4.0)
    assert (result.failures, result.num_failed, result.num_requests) == ({"503": 2}, 2, 5)
    assert result.e2e == Quantiles(2.0, 2.0, 2.0)
    assert summarise(samples, 4.0, 2, 0.1, None).goodput is None


def a_result(rate: float, time: float) -> Result:
    samples = [Sample(end=time, ttft=time / 2, last=time, gaps=[time / 2], num_output_tokens=2, num_prompt_tokens=10)]
    return replace(summarise(samples, 1.0, 4, 0.1, None), tokens_per_second=rate)


def a_row(name: str, number: int, result: Result, load: Load) -> compare.Row:
    target = Target(name, Address("http://host"), "m", 1000, "completions", Counting(0, 1), True)
    return compare.Row(target, load, number, result, 10_000.0)


CLOSED = Load(4, None, 1, Lengths(10, 10), Lengths(2, 2))


def test_ratios_are_medians_of_the_rounds() -> None:
    rates = {"ours": (10, 40, 90), "theirs": (10, 10, 30)}  # 1x, 4x, 3x; of medians it would be 4x
    times = {"ours": (1.0, 1.0, 2.0), "theirs": (2.0, 3.0, 2.0)}  # 2x, 3x, 1x as fast
    rows = [a_row(n, i, a_result(rates[n][i], times[n][i]), CLOSED) for i in range(3) for n in ("ours", "theirs")]
    (ratio,) = compare.ratios(rows)
    assert (ratio.level, ratio.ours, ratio.theirs) == ("4", "ours", "theirs")
    assert ratio.factors == {"tokens_per_second": 3.0, "ttft": 2.0, "tpot": 2.0, "itl": 2.0, "e2e": 2.0}
    assert [compare.median(group, lambda row: row.result.tokens_per_second) for group in compare.grouped(rows)] == [
        40,
        10,
    ]


def test_a_server_that_never_answers_has_no_ratio() -> None:
    nothing = summarise([Sample(end=1.0, error="gone")], 1.0, 1, 0.0, None)
    rows = [a_row("ours", 0, a_result(10, 1), CLOSED), a_row("theirs", 0, nothing, CLOSED)]
    (ratio,) = compare.ratios(rows)
    assert set(ratio.factors.values()) == {None}
    assert compare.warnings(rows) == ["theirs, 4: 1 requests failed with: gone"]


def test_sharing_is_compared_with_own_prompts() -> None:
    loads = [replace(CLOSED, systems=Systems(1, 5, is_shared)) for is_shared in (True, False)]
    rows = [a_row("s", 0, a_result(10, time), load) for load, time in zip(loads, (1.0, 6.0), strict=True)]
    (ratio,) = compare.ratios(rows)
    assert (ratio.ours, ratio.theirs, ratio.factors["ttft"]) == ("s, shared", "s, own", 6.0)


def test_who_counts_otherwise_is_told() -> None:
    load = replace(CLOSED, prompt=Lengths(20, 20))
    (line,) = compare.warnings([a_row("s", 0, a_result(1, 1), load)])
    assert line == "s, 4: prompts were to have 20 tokens on average, and have 10 as this server counts"
    row = a_row("s", 0, a_result(1, 1), CLOSED)
    (line,) = compare.warnings([replace(row, target=replace(row.target, has_usage=False))])
    assert "its streams say no usage" in line


def test_weights_are_read_once_per_step_for_all_streams() -> None:
    row = a_row("s", 0, a_result(100.0, 1), CLOSED)
    assert (row.weights_read, row.share) == (100.0 / 4 * 1000, 2.5)
    assert replace(row, read_limit=None).share is None
    assert replace(row, target=replace(row.target, weight_bytes=None)).weights_read is None


def test_bars() -> None:
    rows = [a_row(name, 0, a_result(rate, 1), CLOSED) for name, rate in (("a", 100.0), ("b", 50.0))]
    lines = plot.bars(rows).splitlines()
    assert lines[0] == "output tokens per second"
    assert [line.count("#") for line in lines[1:3]] == [plot.WIDTH, plot.WIDTH // 2]
    assert lines[1].endswith(" 100.0")
