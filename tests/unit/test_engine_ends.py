"""How requests end: refused, full, aborted, failed."""

from __future__ import annotations

import pytest

from pelton.request import Done, ErrorEvent, Finish
from tests.unit.alone import alone
from tests.unit.toy_executor import VOCAB, Transcript, make_engine, prompt, request, run


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
