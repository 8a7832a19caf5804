"""Timeouts, with a clock of the test's own; and when it is worth coming back."""

from __future__ import annotations

import msgspec
import pytest

from pelton.engine.deadlines import SLACK
from pelton.engine.pace import Shape
from pelton.engine.protocol import Unfold
from pelton.request import Done, EngineRequest, ErrorEvent, Grammar, TokenEvent
from tests.unit.toy_executor import Transcript, make_engine, prompt, request, run


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def limited(id: str, length: int = 5, max_tokens: int = 500, n: int = 1, **limits: float) -> EngineRequest:
    return msgspec.structs.replace(request(id, prompt(length), max_tokens=max_tokens, n=n, temperature=1.0), **limits)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_request_waits_no_longer_than_it_may(clock):
    engine, _ = make_engine(clock=clock, max_sequences=2, queue_timeout=10.0)
    transcript = Transcript()
    asked = [limited("runs"), limited("runs too"), limited("waits"), limited("waits longer", queue_timeout=30.0)]
    for one in asked:
        engine.submit(one)
    for now, ended in ((1009.9, 0), (1010.0, 1), (1029.9, 1), (1030.0, 2)):
        clock.now = now
        transcript.add(engine.step())
        engine.check()
        assert sum(isinstance(events[-1], ErrorEvent) for events in transcript.events.values()) == ended
    for id in ("waits", "waits longer"):
        event = transcript.last(id)
        assert (event.kind, event.param) == ("QueueTimeout", "queue_timeout")
    clock.now += 1000  # those that have begun have no such limit
    run(engine, transcript=transcript)
    assert isinstance(transcript.last("runs"), Done)


@pytest.mark.parametrize("place", ["decoding", "prefill", "waiting", "forking"])
def test_a_request_takes_no_longer_than_it_may(clock, place):
    engine, _ = make_engine(clock=clock, max_sequences=3)
    transcript = Transcript()
    if place == "waiting":
        for i in range(3):
            engine.submit(limited(str(i), max_tokens=40))
    length, n = {"decoding": (5, 3), "prefill": (900, 1), "forking": (900, 3)}.get(place, (5, 1))
    engine.submit(limited("a", length, n=n, timeout=5.0))
    for _ in range(3):
        transcript.add(engine.step())
    clock.now += 4.9
    transcript.add(engine.step())
    engine.submit(limited("other", max_tokens=3))
    clock.now += 0.1
    transcript.add(engine.step())
    engine.check()
    event = transcript.last("a")
    assert (event.kind, event.param) == ("TimedOut", "timeout")
    assert bool(transcript.tokens("a")) == (place == "decoding")
    run(engine, transcript=transcript)
    assert isinstance(transcript.last("other"), Done)


def test_a_limit_passes_while_nothing_runs(clock):
    engine, _ = make_engine(clock=clock)
    engine._grammars.compile = lambda *asked: None  # it takes for ever
    grammar = Grammar(kind="regex", text="a", param="response_format")
    engine.submit(msgspec.structs.replace(limited("a", queue_timeout=5.0), grammar=grammar))
    assert not engine.has_work
    clock.now += 5
    assert engine.has_work
    (event,) = engine.step()
    assert event.kind == "QueueTimeout"
    assert not engine.has_work


def test_a_limit_of_one_that_has_ended_does_not_end_the_next_of_its_name(clock):
    engine, _ = make_engine(clock=clock, request_timeout=5.0)
    run(engine, [limited("a", max_tokens=2)])
    clock.now += 4
    engine.submit(limited("a", max_tokens=2))
    clock.now += 2
    assert any(isinstance(event, TokenEvent) for event in Unfold()(engine.step()))


def test_requests_that_have_ended_are_forgotten_before_their_limits(clock):
    engine, _ = make_engine(clock=clock, max_queue=1000)
    run(engine, [limited("stays", max_tokens=2, timeout=1e9)])
    engine.submit(limited("a", max_tokens=2000, timeout=50.0))
    for i in range(2 * SLACK):
        engine.submit(limited(str(i), max_tokens=1, timeout=1e9))
        engine.abort(str(i))
        engine.step()
    assert len(engine._deadlines) <= SLACK + 8
    clock.now += 60
    assert [event.kind for event in engine.step() if isinstance(event, ErrorEvent)] == ["TimedOut"]


def test_a_pause_is_no_part_of_a_step(clock):
    class Ticking(Clock):
        def __call__(self) -> float:
            self.now += 0.01
            return self.now

    ticking = Ticking()
    engine, _ = make_engine(clock=ticking)
    engine.submit(limited("a"))
    for _ in range(20):
        engine.step()
    known = engine.pace.prices
    for _ in range(10):
        engine.abort("a")
        while engine.has_work:
            engine.step()
        ticking.now += 3600
        engine.submit(limited("a"))
        engine.step()
    assert engine.pace.prices.step < 2 * known.step


def test_a_full_queue_says_when_to_come_back(clock):
    def refused(length: int, num_waiting: int) -> float:
        engine, _ = make_engine(clock=clock, max_sequences=2, max_queue=num_waiting)
        transcript = Transcript()
        for _ in range(3):
            engine.pace.observe(Shape(100, 1, 100, 5000), 2.0)
        for i in range(num_waiting + 3):
            engine.submit(limited(str(i), length))
        transcript.add(engine.step())
        event = transcript.last(str(num_waiting + 2))
        assert event.kind == "Overloaded"
        assert f"{num_waiting + 2} requests with {length * (num_waiting + 2)} prompt tokens" in event.message
        return event.retry_after

    few, many, long = refused(5, 2), refused(5, 20), refused(500, 2)
    assert few < many
    assert few < long


def test_the_time_in_the_queue_and_to_the_first_token_is_told_with_the_end(clock):
    engine, _ = make_engine(clock=clock, max_sequences=1)
    engine.submit(request("first", prompt(20), max_tokens=2))
    clock.now += 3
    engine.submit(request("second", prompt(20), max_tokens=2))
    ends = {}
    while engine.has_work:
        clock.now += 1
        ends |= {event.request_id: event for event in engine.step() if isinstance(event, Done)}
    assert ends["first"].queued == 4
    assert ends["second"].queued >= 2
    engine, _ = make_engine(clock=clock, max_sequences=1, max_batch_tokens=10)
    engine.submit(request("long", prompt(45), max_tokens=2))  # five steps to its first token
    while engine.has_work:
        clock.now += 1
        ends |= {event.request_id: event for event in engine.step() if isinstance(event, Done)}
    assert ends["long"].prefill == 4
