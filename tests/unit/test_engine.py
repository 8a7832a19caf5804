"""The engine over a toy executor: exactness, forks, preemption, cancellation, one terminal event."""

from __future__ import annotations

import itertools
import random
from array import array

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pelton.request import Done, ErrorEvent, Finish, PromptEvent, TokenEvent
from tests.unit.toy_executor import VOCAB, Transcript, digest, make_engine, prompt, ranking, request, run, view

GROUPS = [(None,), (None, 48), (40,), (None, 40, 100)]
MIX = [
    request("greedy", prompt(70)),
    request("seeded", prompt(70), temperature=1.0, seed=7, max_tokens=20),
    request("choices", prompt(45, 3), n=3, temperature=0.8, seed=3, max_tokens=12),
    request("penalties", prompt(33), repetition_penalty=1.2, presence_penalty=0.5, max_tokens=40),
    request("frequency", prompt(64), frequency_penalty=0.5, max_tokens=40),
    request("short", prompt(1, 5), max_tokens=70),
    request("min", prompt(10), end_ids=tuple(range(0, VOCAB, 2)), min_tokens=6, max_tokens=30),
    request("logprobs", prompt(150), logprobs=3, max_tokens=10),
    request("scored", prompt(100), prompt_logprobs=2, n=2, max_tokens=5),
    request("score alone", prompt(70), prompt_logprobs=0, max_tokens=0),
    request("mirostat", prompt(30, 8), mirostat_mode=2, temperature=1.0, n=2, max_tokens=40),
    request("dry", prompt(30, 8), dry_multiplier=1e9, dry_allowed_length=1, max_tokens=40),
    request("allowed", prompt(20, 4), allowed_token_ids=(1, 3, 44), max_tokens=20),
    msgspec.structs.replace(
        request("bad words", prompt(20, 4), allowed_token_ids=(1, 3, 44, 45), bad_words=("",), max_tokens=40),
        bad_words_ids=((1, 3), (44,), (3, 3, 45), (45, 45)),
    ),
]


_ALONE = {}


def alone(one, windows=(None,)):
    key = (msgspec.json.encode(one), windows)
    if key not in _ALONE:
        settings = {"prefix_cache": False, "max_batch_tokens": 1000, "speculation": "off"}
        engine, _ = make_engine(windows=windows, num_blocks=40, **settings)
        _ALONE[key] = run(engine, [one]).answers(one.id)
    return _ALONE[key]


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


def even(seconds=1.0):
    """A clock by which all steps take as long, so that drafts pay."""
    return itertools.count(step=seconds).__next__


REPEATING = [(1,), (2,), (1, 2)]
"""What the toy model goes round in circles with."""


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
    if settings.get("max_batch_tokens") != 9:  # there, only what is sure to be accepted finds room
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


@pytest.mark.parametrize(
    ("asked", "kind", "words"),
    [
        (request("a", []), "InvalidRequest", "no tokens"),
        (request("a", [VOCAB]), "InvalidRequest", f"0 to {VOCAB - 1}"),
        (request("a", [-1]), "InvalidRequest", "ids"),
        (request("a", [1], logit_bias={VOCAB: 1.0}), "InvalidRequest", "logit_bias"),
        (request("a", [1], n=9), "InvalidRequest", "n (or best_of) is 9"),
        (request("a", [1], max_tokens=-1), "InvalidRequest", "max_tokens is -1"),
        (request("a", prompt(6000), max_tokens=500), "ContextLengthExceeded", "6000 tokens, which with max_tokens 500"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(asked, kind, words):
    engine, _ = make_engine()
    transcript = run(engine, [asked])
    (event,) = transcript.events["a"]
    assert isinstance(event, ErrorEvent)
    assert event.kind == kind
    assert words in event.message


def test_the_queue_is_bounded():
    engine, _ = make_engine(max_queue=3, max_sequences=2)
    transcript = run(engine, [request(str(i), prompt(5, i)) for i in range(7)])
    kinds = [type(transcript.last(str(i))) for i in range(7)]
    assert kinds == [Done] * 5 + [ErrorEvent] * 2
    assert transcript.last("6").kind == "Overloaded"


def test_abort_in_every_state():
    engine, _ = make_engine(max_sequences=4, num_blocks=40)
    transcript = Transcript()
    engine.submit(request("decoding", prompt(5), max_tokens=100))
    transcript.add(engine.step())
    engine.submit(request("prefill", prompt(300, 1), n=3))
    transcript.add(engine.step())
    engine.submit(request("queued", prompt(300, 2)))
    transcript.add(engine.step())
    states = {id: engine._answers.groups[id].sequences[0].state for id in ("decoding", "prefill", "queued")}
    assert states == {"decoding": "running", "prefill": "running", "queued": "waiting"}
    for id in states:
        engine.abort(id)
        engine.check()
        engine.abort(id)
        engine.abort("unknown")
    assert engine.counters.kv_blocks_used == 0
    run(engine, transcript=transcript)
    for id, choices in {"decoding": 1, "prefill": 3, "queued": 1}.items():
        assert [e.reason for e in transcript.events[id] if isinstance(e, Finish)] == ["abort"] * choices
        assert isinstance(transcript.last(id), Done)


@pytest.mark.parametrize("choice", [0, 1, 2])
@pytest.mark.parametrize("steps", [0, 1, 4, 8])
def test_abort_of_one_choice_leaves_the_others_as_they_were(choice, steps):
    engine, _ = make_engine()
    asked = request("a", prompt(200), n=3, temperature=1.0, max_tokens=12)
    transcript = Transcript()
    engine.submit(asked)
    for _ in range(steps):
        transcript.add(engine.step())
    engine.abort("a", choice)
    engine.check()
    run(engine, transcript=transcript)
    others = [e for e in alone(asked) if e.choice != choice]
    assert [e for e in transcript.answers("a") if e.choice != choice] == others


def test_a_failed_step_ends_the_requests_in_flight_and_only_them():
    engine, executor = make_engine()
    transcript = Transcript()
    engine.submit(request("a", prompt(50), n=2))
    engine.submit(request("b", prompt(500)))
    for _ in range(3):
        transcript.add(engine.step())
    executor.fail_next = True
    transcript.add(engine.advance())
    assert not engine.has_work
    for id in ("a", "b"):
        event = transcript.last(id)
        assert isinstance(event, ErrorEvent)
        assert event.kind == "InternalError"
        assert "the toy broke" in event.message
    asked = request("c", prompt(50))
    assert run(engine, [asked]).answers("c") == alone(asked)


def test_a_row_that_can_draw_nothing_ends_its_request_alone():
    engine, _ = make_engine()
    nothing = {id: float("-inf") for id in range(VOCAB)}
    asked = request("fine", prompt(30), n=2, temperature=1.0)
    transcript = run(engine, [request("none", prompt(40), n=3, logit_bias=nothing), asked])
    (_, event) = transcript.events["none"]
    assert isinstance(event, ErrorEvent)
    assert event.param == "logit_bias"
    assert transcript.answers("fine") == alone(asked)


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
