"""A request's parameters: limits, what they become for the engine, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from pelton.errors import InvalidRequest
from pelton.request import ProcessorCall
from tests.unit.scripted_engine import ScriptedEngine, info, saying
from tests.unit.served import answer, ids, request, sampling


def test_priority_tenant_and_salt_reach_the_engine() -> None:
    engine = ScriptedEngine(saying(ids("x")))
    answer(engine, request(prompt="hi", priority=-7, user="ada", cache_salt="mine"))
    answer(engine, request(prompt="hi"))
    assert [(sent.priority, sent.tenant) for sent in engine.requests] == [(-7, "ada"), (0, "")]
    assert [sent.cache_salt for sent in engine.requests] == ["mine", ""]
    with pytest.raises(InvalidRequest, match="priority"):
        answer(engine, request(prompt="hi", priority=1 << 40))


def test_timeouts_reach_the_engine() -> None:
    engine = ScriptedEngine(saying(ids("x")))
    answer(engine, request(prompt="hi", timeout=9.0, queue_timeout=0.5))
    assert (engine.requests[0].timeout, engine.requests[0].queue_timeout) == (9.0, 0.5)
    for bad in ({"timeout": 0.0}, {"timeout": float("nan")}, {"queue_timeout": -1.0}):
        with pytest.raises(InvalidRequest, match="timeout"):
            answer(engine, request(prompt="hi", **bad))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("best_of", 3),
        ("top_p", 0.5),
        ("stop", ("x",)),
        ("presence_penalty", 1.0),
        ("logit_bias", {5: 1.0}),
        ("temperature", 0.7),
        ("max_tokens", 0),
        ("beam_width", 0),
    ],
)
def test_what_means_nothing_to_a_beam_search_is_refused(field: str, value: Any) -> None:
    engine = ScriptedEngine(saying([5]))
    with pytest.raises(InvalidRequest) as caught:
        answer(engine, sampling(use_beam_search=True, **{field: value}))
    assert caught.value.param == field
    assert engine.requests == []
    answer(engine, sampling(use_beam_search=True, beam_width=4, temperature=0.0))
    assert engine.requests[0].sampling.beam_width == 4


def test_best_of_is_at_least_n() -> None:
    with pytest.raises(InvalidRequest, match="best_of is 1, less than n, which is 2"):
        answer(ScriptedEngine(saying([5])), sampling(n=2, best_of=1))


def test_limits_and_seeds() -> None:
    engine = ScriptedEngine(saying(ids("x")), info=info(context=20))
    num_prompt = len(ids("Hello"))
    for given, expected in ((None, 20 - num_prompt), (3, 3), (10**9, 20 - num_prompt)):
        answer(engine, sampling(max_tokens=given, top_k=-1))
        assert engine.requests[-1].sampling.max_tokens == expected
        assert engine.requests[-1].sampling.top_k == 0
    answer(engine, sampling(min_tokens=500))
    assert engine.requests[-1].sampling.min_tokens == 20 - num_prompt
    seeds = {each.sampling.seed for each in engine.requests}
    assert None not in seeds
    assert len(seeds) == len(engine.requests)
    for seed in (0, -5, 2**64 - 1):
        answer(engine, sampling(seed=seed))
        assert engine.requests[-1].sampling.seed == seed


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", 10**9),
        ("best_of", 0),
        ("beam_width", 3),
        ("length_penalty", float("nan")),
        ("best_of", 10**9),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", float("nan")),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 1.5),
        ("typical_p", 1.1),
        ("top_n_sigma", -1.5),
        ("top_n_sigma", float("nan")),
        ("xtc_probability", -0.1),
        ("xtc_threshold", 1.1),
        ("mirostat_mode", 1),
        ("mirostat_tau", 0.0),
        ("mirostat_eta", 1.1),
        ("dry_multiplier", -0.1),
        ("dry_base", 0.9),
        ("dry_allowed_length", 0),
        ("dry_penalty_last_n", -2),
        ("dry_sequence_breakers", ("",)),
        ("dry_sequence_breakers", ("x",) * 65),
        ("bad_words", ("",)),
        ("bad_words", (" ",)),
        ("bad_words", ("x",) * 1025),
        ("allowed_token_ids", ()),
        ("allowed_token_ids", (10**7,)),
        ("prompt_logprobs", 21),
        ("prompt_logprobs", -1),
        ("logits_processors", (ProcessorCall(name="x", args={"a": 10**30}),)),
        ("logits_processors", ("x",) * 65),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("seed", 2**64),
        ("logprobs", -1),
        ("logprobs", 21),
        ("stop", ("",)),
        ("stop", ("x" * 2000,)),
        ("stop", ("x",) * 100),
        ("stop_token_ids", (10**7,)),
        ("stop_token_ids", (-1,)),
        ("logit_bias", {10**7: 1.0}),
        ("logit_bias", {5: 101.0}),
        ("logit_bias", {5: float("nan")}),
        ("logit_bias", {i % 400: 1.0 for i in range(5000)} | {400 + i: 0.0 for i in range(5000)}),
    ],
)
def test_parameters_out_of_range(field: str, value: Any) -> None:
    engine = ScriptedEngine(saying([5]))
    with pytest.raises(InvalidRequest) as caught:
        answer(engine, sampling(**{field: value}))
    assert caught.value.param == field
    assert engine.requests == []


def test_min_tokens_over_max_tokens() -> None:
    with pytest.raises(InvalidRequest, match="min_tokens is 5, must be from 0 to 4"):
        answer(ScriptedEngine(saying([5])), sampling(max_tokens=4, min_tokens=5))
