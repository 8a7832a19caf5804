"""Pinned prefixes stay in memory whatever comes, within bounds, and go when their time is over."""

from __future__ import annotations

import pytest

from pelton.request import Done, ErrorEvent
from tests.unit.alone import alone
from tests.unit.toy_executor import ToyExecutor, Transcript, make_engine, prompt, request, run

WINDOWS = [(None,), (None, 40), (70,), (None, 33, 90)]


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def pin(id: str, tokens: list[int], ttl: float = 60, salt: str = ""):
    return request(id, tokens, max_tokens=0, pin_ttl=ttl, salt=salt)


def cached(transcript: Transcript, id: str) -> int:
    done = transcript.last(id)
    assert isinstance(done, Done)
    return done.usage.cached_tokens


def engine_of(windows: tuple[int | None, ...], clock: Clock, num_blocks: int = 60, context: int = 600):
    return make_engine(windows=windows, num_blocks=num_blocks, context=context, clock=clock)


def crowd(engine, first: int = 0) -> None:
    """Prompts that need all of the memory, several times over."""
    run(engine, [request(f"crowd-{first + i}", prompt(500, 50 + first + i)) for i in range(12)])


@pytest.mark.parametrize("windows", WINDOWS)
def test_what_is_pinned_outlasts_a_crowd_until_its_time_is_over(windows: tuple[int | None, ...]):
    clock = Clock()
    engine, _ = engine_of(windows, clock)
    tokens = prompt(330)
    run(engine, [pin("p", tokens)])
    assert [(info.id, info.num_tokens) for info in engine.counters.pins] == [("p", 320)]
    assert engine.counters.pins[0].expires_at - engine.counters.pins[0].created_at == pytest.approx(60)
    crowd(engine)
    asked = [*tokens, 1, 2, 3]
    assert cached(run(engine, [request("a", asked)]), "a") >= 320
    clock.now += 61
    assert engine.has_work
    engine.step()
    assert engine.counters.pins == ()
    assert engine.counters.kv_blocks_used == 0
    crowd(engine, 20)
    assert cached(run(engine, [request("b", asked)]), "b") == 0


def test_an_unpinned_prefix_is_like_any_other():
    engine, _ = engine_of((None,), Clock())
    run(engine, [pin("p", prompt(330))])
    engine.unpin("p")
    engine.unpin("p")
    engine.check()
    assert engine.counters.kv_blocks_used == 0
    assert cached(run(engine, [request("a", prompt(330))]), "a") > 0
    crowd(engine)
    assert cached(run(engine, [request("b", prompt(330))]), "b") == 0


def test_pins_share_blocks_and_keep_to_their_salt():
    engine, _ = engine_of((None,), Clock())
    transcript = run(engine, [pin("p", prompt(330)), pin("q", prompt(330), salt="mine")])
    assert cached(transcript, "q") == 0
    engine.unpin("p")
    engine.check()
    assert cached(run(engine, [request("a", prompt(330), salt="mine")]), "a") == 329


def test_more_than_the_share_is_refused_and_says_so():
    engine, _ = engine_of((None,), Clock())  # 59 blocks, of which one context takes 19: 29 may be pinned
    run(engine, [pin("p", prompt(590, 1)), pin("q", prompt(320, 2))])
    transcript = run(engine, [pin("r", prompt(320, 3))])
    error = transcript.last("r")
    assert isinstance(error, ErrorEvent)
    assert error.kind == "Overloaded"
    assert "may take 29 in all, of which 28 are taken" in error.message
    assert 50 < (error.retry_after or 0) <= 60
    assert len(engine.counters.pins) == 2


def test_what_pins_share_counts_once():
    engine, _ = engine_of((None,), Clock())  # 29 blocks may be pinned
    system = prompt(480, 1)
    for number in range(8):  # 15 blocks that all share, and one of its own
        transcript = run(engine, [pin(f"p{number}", [*system, *prompt(32, 10 + number)])])
        assert isinstance(transcript.last(f"p{number}"), Done)
    assert isinstance(run(engine, [pin("q", prompt(224, 2))]).last("q"), ErrorEvent)  # 23 + 7
    assert isinstance(run(engine, [pin("r", prompt(192, 2))]).last("r"), Done)
    assert isinstance(run(engine, [pin("s", system, salt="mine")]).last("s"), ErrorEvent)
    engine.check()


@pytest.mark.parametrize(
    ("num_blocks", "tokens", "message"), [(60, 31, "31 tokens"), (20, 320, "may take 0 in all"), (60, 590, None)]
)
def test_what_can_never_be_pinned_is_refused(num_blocks: int, tokens: int, message: str | None):
    engine, _ = engine_of((None,), Clock(), num_blocks)
    transcript = run(engine, [pin("p", prompt(tokens))])
    last = transcript.last("p")
    if message is None:
        assert isinstance(last, Done)
    else:
        assert isinstance(last, ErrorEvent)
        assert last.kind == "InvalidRequest"
        assert message in last.message


def test_a_whole_context_still_runs_beside_all_that_can_be_pinned():
    engine, _ = engine_of((None,), Clock(), 45)
    run(engine, [pin("p", prompt(590, 7))])
    assert len(engine.counters.pins) == 1
    run(engine, [request("a", prompt(580), max_tokens=20)])


def test_two_that_are_asked_for_at_once_cannot_both_have_the_last_room():
    engine, _ = engine_of((None,), Clock())
    transcript = run(engine, [pin("p", prompt(590, 1)), pin("q", prompt(590, 2))])
    kinds = sorted(type(transcript.last(id)).__name__ for id in "pq")
    assert kinds == ["Done", "ErrorEvent"]
    assert len(engine.counters.pins) == 1


def test_a_failed_step_drops_pins():
    engine, executor = engine_of((None,), Clock())
    assert isinstance(executor, ToyExecutor)
    run(engine, [pin("p", prompt(330))])
    executor.fail_next = True
    engine.submit(request("a", prompt(5)))
    engine.advance()
    assert engine.counters.pins == ()
    assert engine.counters.kv_blocks_used == 0


def test_without_a_prefix_cache_there_is_nothing_to_pin_in():
    engine, _ = make_engine(prefix_cache=False)
    last = run(engine, [pin("p", prompt(330))]).last("p")
    assert isinstance(last, ErrorEvent)
    assert "no prefix cache" in last.message


@pytest.mark.parametrize("windows", [(None,), (None, 40)])
@pytest.mark.parametrize(("num_blocks", "width"), [(9, 4), (9, 8), (12, 8), (16, 6)])
def test_searches_go_on_in_what_pins_leave(windows, num_blocks, width):
    """However little that is: slots that have their candidates make way for those that cannot get theirs."""
    engine, _ = engine_of(windows, Clock(), num_blocks, context=128)
    for number in range(engine._pins._limits[0]):
        run(engine, [pin(f"pin {number}", prompt(33, number))])
    asked = [
        request(id, prompt(60, 50), n=2, use_beam_search=True, beam_width=width, max_tokens=60) for id in ("a", "b")
    ]
    asked.append(request("c", prompt(40, 70), n=3, temperature=1.0, max_tokens=60))
    transcript, num_steps = Transcript(), 0
    for one in asked:
        engine.submit(one)
    while engine.has_work:
        transcript.add(engine.step())
        engine.check()
        num_steps += 1
        assert num_steps < 2000
    for one in asked:
        assert transcript.answers(one.id) == alone(one, windows)
