"""The engine over a toy executor: exactness, forks, preemption, the prefix cache, one terminal event."""

from __future__ import annotations

import random

import numpy as np
import pytest

from pelton.request import Done, Finish, PromptEvent, TokenEvent
from tests.unit.alone import GROUPS, MIX, alone, even
from tests.unit.toy_executor import VOCAB, Transcript, digest, make_engine, prompt, ranking, request, run, view


@pytest.mark.parametrize("windows", GROUPS)
def test_output_is_that_of_the_definition(windows):
    tokens = prompt(90)
    engine, _ = make_engine(windows=windows)
    answer = run(engine, [request("a", tokens, max_tokens=50)]).tokens("a")
    for token in answer:
        views = tuple(view(tokens if w is None else tokens[-w:]) for w in windows)
        assert token == digest(views, []) % VOCAB
        tokens.append(token)


@pytest.mark.parametrize("windows", GROUPS)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_batch_tokens": 5, "max_sequences": 5},
        {"max_batch_tokens": 37},
        {"prefix_cache": False},
        {"num_blocks": 10},  # two or three at once: preemption
        {"num_blocks": 10, "prefix_cache": False},
        {"num_blocks": 10, "prefix_cache": False, "swap": 1200},
        {"num_blocks": 10, "swap": 10_000},
        {"num_blocks": 12, "max_batch_tokens": 9},
        {"max_sequences": 3},
    ],
    ids=str,
)
def test_alone_is_batched_is_chunked_is_preempted(windows, settings):
    if len([w for w in windows if w]) and "num_blocks" in settings:
        settings = settings | {"num_blocks": settings["num_blocks"] + 2}
    engine, _ = make_engine(windows=windows, **settings)
    mixed = run(engine, MIX)
    for one in MIX:
        assert mixed.answers(one.id) == alone(one, windows), one.id
    warm = run(engine, MIX)
    for one in MIX:
        assert warm.answers(one.id) == alone(one, windows), one.id
    if not settings.get("prefix_cache", True) and "num_blocks" in settings:
        assert engine.counters.preempted > 0
        assert (engine.counters.swapped > 0) == ("swap" in settings)


"""What the toy model goes round in circles with."""


@pytest.mark.parametrize("windows", [*GROUPS, (33,), (1,), (None, 8)])
def test_a_hit_of_every_length(windows):
    base = prompt(80)
    for length in range(1, 66):
        engine, _ = make_engine(windows=windows)
        run(engine, [request("first", base, max_tokens=2)])
        other = [*base[:length], (base[length] + 1) % VOCAB, *prompt(10, 9)]
        asked = request("second", other, logprobs=2, max_tokens=3)
        transcript = run(engine, [asked])
        assert transcript.answers("second") == alone(asked, windows)
        usage = transcript.last("second").usage
        assert usage.cached_tokens == length if windows[0] is None and len(windows) == 1 else True
        assert usage.cached_tokens <= length


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 64, 65])
def test_a_whole_prompt_in_the_cache_computes_its_last_token_again(length):
    engine, _ = make_engine()
    asked = request("a", prompt(length))
    cold = run(engine, [asked])
    warm = run(engine, [asked])
    assert warm.answers("a") == cold.answers("a")
    assert warm.last("a").usage.cached_tokens == length - 1
    assert cold.last("a").usage.cached_tokens == 0


def test_a_prompt_is_shared_to_its_last_token_while_its_first_owner_still_runs():
    engine, _ = make_engine()
    transcript = Transcript()
    engine.submit(request("a", prompt(50), max_tokens=30))
    transcript.add(engine.step())
    run(engine, [request("b", prompt(50), max_tokens=30)], transcript)
    assert transcript.last("b").usage.cached_tokens == 49
    assert transcript.tokens("a") == transcript.tokens("b")


def test_a_later_turn_finds_prompt_and_answer():
    engine, _ = make_engine()
    first = prompt(50)
    answer = run(engine, [request("a", first, max_tokens=40)]).tokens("a")
    asked = request("b", first + answer + prompt(10, 4))
    transcript = run(engine, [asked])
    assert transcript.last("b").usage.cached_tokens == 50 + 40 - 1  # the last token was never computed
    assert transcript.answers("b") == alone(asked)


def test_a_burst_with_one_prefix_computes_it_once():
    engine, executor = make_engine()
    common = prompt(130)
    asked = [request(str(i), [*common, i]) for i in range(6)]
    transcript = run(engine, asked)
    assert sum(len(step.ids) for step in executor.steps) < 131 + 6 * (40 + 8)
    for one in asked:
        assert transcript.answers(one.id) == alone(one)


def test_another_salt_shares_nothing():
    engine, _ = make_engine()
    run(engine, [request("a", prompt(64), salt="x")])
    assert run(engine, [request("b", prompt(64), salt="y")]).last("b").usage.cached_tokens == 0
    assert run(engine, [request("c", prompt(64), salt="x")]).last("c").usage.cached_tokens == 63


def test_decodes_never_wait_for_a_prompt():
    engine, executor = make_engine()
    transcript = Transcript()
    engine.submit(request("stream", prompt(5), max_tokens=100, ignore_eos=True))
    transcript.add(engine.step())
    engine.submit(request("huge", prompt(3000, 1)))
    before = len(executor.steps)
    for _ in range(40):
        transcript.add(engine.step())
    assert len(executor.steps) - before == 40
    assert len(transcript.tokens("stream")) == 41
    run(engine, transcript=transcript)


def test_a_short_prompt_starts_before_a_huge_one_ends_and_that_gets_on():
    engine, _ = make_engine(clock=even(0.01))
    transcript = Transcript()
    engine.submit(request("huge", prompt(3000, 1)))
    engine.submit(request("huge too", prompt(2900, 2)))
    for turn in range(30):
        engine.submit(request(f"short {turn}", prompt(60, turn + 10), max_tokens=2))
        transcript.add(engine.step())
    assert len(transcript.tokens("short 0")) == 2
    sequence = engine._answers.groups["huge"].sequences[0]
    assert sequence.num_computed >= 30 * 15
    run(engine, transcript=transcript)


def test_choices_share_their_prompt():
    engine, executor = make_engine()
    asked = request("a", prompt(100), n=4, temperature=1.0)
    transcript = run(engine, [asked])
    assert sum(len(step.ids) for step in executor.steps) == 100 + 4 * 7
    assert transcript.answers("a") == alone(asked)
    assert len({tuple(transcript.tokens("a", choice)) for choice in range(4)}) == 4
    assert isinstance(transcript.last("a"), Done)
    assert transcript.last("a").usage.completion_tokens == 4 * 8


@pytest.mark.parametrize("length", [1, 2, 33, 200])
def test_prompts_are_scored_token_by_token(length):
    engine, _ = make_engine()
    tokens = prompt(length)
    run(engine, [request("fill the cache", tokens)])
    asked = request("a", tokens, prompt_logprobs=2, max_tokens=0, n=2)
    transcript = run(engine, [asked])
    scores = [e for e in transcript.events["a"] if isinstance(e, PromptEvent)]
    assert [e.token_id for e in scores] == tokens[1:]
    for i, event in enumerate(scores):
        seen = (view(tokens[: i + 1]),)
        assert event.logprob == np.float32(-digest(seen, event.token_id) / 2**32)
        assert [top.id for top in event.top] == [id for id, _ in ranking(seen)[:2]]
    assert [e for e in transcript.events["a"] if isinstance(e, Finish)] == [Finish("a", i, "length") for i in range(2)]
    usage = transcript.last("a").usage
    assert usage.completion_tokens == 0
    assert usage.cached_tokens == 0
    assert len(transcript.events["a"]) == 1 + length - 1 + 2 + 1


def test_the_cache_serves_a_scored_prompt_once_it_is_scored():
    engine, _ = make_engine(num_blocks=7)
    asked = [
        request("old", prompt(60, 1), max_tokens=90),
        request("scored", prompt(60), prompt_logprobs=0, max_tokens=60),
    ]
    transcript = run(engine, asked)
    assert engine.counters.preempted > 0
    for one in asked:
        assert transcript.answers(one.id) == alone(one)


def test_end_tokens_and_limits():
    engine, _ = make_engine()
    free = run(engine, [request("a", prompt(9), max_tokens=30)]).tokens("a")
    end = free[11]
    at = free.index(end)
    transcript = run(engine, [request("b", prompt(9), max_tokens=30, end_ids=(end,))])
    assert transcript.tokens("b") == free[:at]
    assert Finish("b", 0, "stop", end) in transcript.events["b"]
    assert transcript.last("b").usage.completion_tokens == at + 1
    stop = run(engine, [request("c", prompt(9), max_tokens=30, stop_token_ids=(end,), ignore_eos=True)])
    assert stop.tokens("c") == free[:at]
    ignore = run(engine, [request("d", prompt(9), max_tokens=30, end_ids=(end,), ignore_eos=True)])
    assert ignore.tokens("d") == free
    assert Finish("d", 0, "length") in ignore.events["d"]
    longer = run(engine, [request("e", prompt(9), max_tokens=30, min_tokens=20, end_ids=(end,))])
    assert len(longer.tokens("e")) >= 20
    assert end not in longer.tokens("e")[:20]


def test_logprobs_come_where_they_are_asked_for():
    engine, _ = make_engine()
    transcript = run(
        engine, [request("a", prompt(9), logprobs=2), request("b", prompt(9)), request("c", prompt(8), logprobs=0)]
    )
    tokens = [e for e in transcript.events["a"] if isinstance(e, TokenEvent)]
    assert all(len(e.top) == 2 and e.logprob is not None for e in tokens)
    assert all(e.top == () and e.logprob is None for e in transcript.events["b"] if isinstance(e, TokenEvent))
    assert all(e.top == () and e.logprob is not None for e in transcript.events["c"] if isinstance(e, TokenEvent))


@pytest.mark.parametrize("windows", GROUPS)
def test_whatever_happens(windows):
    """Requests that come, go and compete for little memory, all exact."""
    rng = random.Random(5)
    bases = [prompt(120, i) for i in range(4)]
    engine, _ = make_engine(windows=windows, num_blocks=14, max_batch_tokens=48, max_queue=20)
    transcript = Transcript()
    asked = {}
    for number in range(150):
        body = rng.choice(bases)[: rng.randrange(1, 120)] + prompt(rng.randrange(4), number)
        one = request(
            f"r{number}",
            body,
            n=rng.choice([1, 1, 1, 2, 4]),
            max_tokens=rng.randrange(1, 90),
            temperature=rng.choice([0.0, 1.0]),
            end_ids=(rng.randrange(VOCAB),),
        )
        asked[one.id] = one
        engine.submit(one)
        for _ in range(rng.randrange(12)):
            transcript.add(engine.step())
            engine.check()
        if number % 7 == 0:
            engine.abort(f"r{rng.randrange(number + 1)}", rng.choice([None, None, 0, 1]))
            engine.check()
    run(engine, transcript=transcript)
    finished = 0
    for id, one in asked.items():
        if isinstance(transcript.last(id), Done):
            told, whole = transcript.answers(id), alone(one, windows)
            if not any(isinstance(e, Finish) and e.reason == "abort" for e in told):
                assert told == whole
                finished += 1
    assert finished > 50
    assert engine.counters.preempted > 5
