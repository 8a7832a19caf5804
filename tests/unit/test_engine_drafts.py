"""Drafts in the engine: no answer changes by them."""

from __future__ import annotations

import random
from array import array

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pelton.request import TokenEvent
from tests.unit.alone import GROUPS, MIX, alone, even
from tests.unit.toy_executor import VOCAB, Transcript, make_engine, prompt, request, run


def guess(sequence, truth, rng):
    """Up to five tokens, of which the first ones, or all, are right."""
    left = sequence.group.request.sampling.max_tokens - sequence.num_output
    tokens = truth[sequence.num_output :][: min(rng.randrange(6), left - 1)]
    if tokens and rng.random() < 0.5:
        tokens[rng.randrange(len(tokens))] = rng.randrange(VOCAB)
    while set(tokens) & sequence.group.end_ids:
        tokens.pop()
    return array("i", tokens)


class Guesses:
    """Drafts that are right as often as not."""

    def __init__(self, truths):
        self.truths = truths
        self.rng = random.Random(7)

    def rests(self, num_sequences):
        return False

    def draft(self, shape, sequences, spare):
        for sequence in sequences:
            sequence.draft = guess(sequence, self.truths[sequence.group.request.id, sequence.choice], self.rng)


@pytest.mark.parametrize("windows", GROUPS)
@pytest.mark.parametrize("settings", [{}, {"max_batch_tokens": 9}, {"num_blocks": 12}, {"max_batch_tokens": 1000}])
def test_drafts_change_nothing(windows, settings):
    if len([w for w in windows if w]) and "num_blocks" in settings:
        settings = settings | {"num_blocks": settings["num_blocks"] + 2}
    engine, executor = make_engine(windows=windows, clock=even(), **settings)
    transcript = Transcript()
    for one in MIX:
        engine.submit(one)
    truths = {
        (one.id, choice): [e.token_id for e in alone(one, windows) if isinstance(e, TokenEvent) and e.choice == choice]
        for one in MIX
        for choice in range(one.sampling.n)
    }
    engine.scheduler.drafts.speculation = Guesses(truths)  # type: ignore[assignment]
    run(engine, (), transcript)
    assert 0 < engine.counters.accepted <= engine.counters.drafted
    if settings.get("max_batch_tokens") != 9:  # there, only what is sure to be accepted finds room
        assert engine.counters.accepted < engine.counters.drafted
    msgspec.msgpack.encode(engine.counters)  # an engine process sends them
    for one in MIX:
        assert transcript.answers(one.id) == alone(one, windows), one.id
    plain, plain_executor = make_engine(windows=windows, **settings)
    expected = run(plain, MIX)
    for one in MIX:
        assert transcript.last(one.id).usage.completion_tokens == expected.last(one.id).usage.completion_tokens
    if not settings:  # little room for drafts elsewhere
        assert len(executor.steps) < len(plain_executor.steps)
    again = run(engine, MIX)
    for one in MIX:
        assert again.answers(one.id) == alone(one, windows), one.id


REPEATING = [(1,), (2,), (1, 2)]


@pytest.mark.parametrize("windows", REPEATING)
@pytest.mark.parametrize(
    "settings",
    [{}, {"max_batch_tokens": 9}, {"num_blocks": 12}, {"num_blocks": 12, "prefix_cache": False, "swap": 10_000}],
    ids=str,
)
def test_speculation_changes_nothing_but_the_number_of_steps(windows, settings):
    mix = [msgspec.structs.replace(one, sampling=longer(one.sampling)) for one in MIX]
    plain, plain_executor = make_engine(windows=windows, speculation="off", **settings)
    expected = run(plain, mix)
    engine, executor = make_engine(windows=windows, clock=even(), **settings)
    drafted = run(engine, mix)
    again = run(engine, mix)
    for one in mix:
        assert drafted.answers(one.id) == again.answers(one.id) == expected.answers(one.id), one.id
        completion = drafted.last(one.id).usage.completion_tokens
        assert completion == expected.last(one.id).usage.completion_tokens
    assert 0 < engine.counters.accepted <= engine.counters.drafted
    if not settings:  # elsewhere, at times only what is sure to be accepted finds room
        assert engine.counters.accepted < engine.counters.drafted
    assert plain.counters.drafted == 0
    assert len(executor.steps) < 2 * len(plain_executor.steps)


def longer(sampling):
    return msgspec.structs.replace(sampling, max_tokens=3 * sampling.max_tokens)


ASKED = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 90), "temperature": st.sampled_from([0.0, 0.0, 1.0]), "n": st.integers(1, 3)},
    optional={
        "logprobs": st.just(2),
        "min_tokens": st.integers(0, 20),
        "stop_token_ids": st.lists(st.integers(0, VOCAB - 1), max_size=3).map(tuple),
        "frequency_penalty": st.just(0.5),
        "repetition_penalty": st.just(1.2),
        "mirostat_mode": st.just(2),
        "dry_multiplier": st.just(1e9),
        "logit_bias": st.just({3: -100.0, 4: 1.0}),
        "ignore_eos": st.booleans(),
    },
)


@settings(max_examples=40, deadline=None)
@given(st.lists(ASKED, min_size=1, max_size=5), st.integers(8, 30), st.sampled_from(REPEATING), st.integers(0, 9))
def test_any_mix_with_drafts_is_as_without(asked, num_blocks, windows, aborted):
    mix = [request(str(i), prompt(20 + 9 * i, i), end_ids=(7, 8), **params) for i, params in enumerate(asked)]
    plain, _ = make_engine(windows=windows, num_blocks=40, speculation="off")
    expected = run(plain, mix)
    engine, _ = make_engine(windows=windows, num_blocks=num_blocks, clock=even(), max_batch_tokens=30)
    transcript = Transcript()
    for one in [*mix, request("aborted", prompt(30), max_tokens=60, n=2)]:
        engine.submit(one)
    for _ in range(aborted):
        transcript.add(engine.step())
    engine.abort("aborted", 1)
    transcript.add(engine.step())
    engine.abort("aborted")
    run(engine, (), transcript)
    for one in mix:
        assert transcript.answers(one.id) == expected.answers(one.id)
        usages = [ran.last(one.id).usage.completion_tokens for ran in (transcript, expected)]
        assert usages[0] == usages[1]
