"""Idle priority: what nobody else needs, by policy alone."""

from __future__ import annotations

from pelton.engine.pace import Pace, Prices
from pelton.engine.sequence import Sequence
from pelton.request import IDLE
from tests.unit.test_scheduler import arrive, make, step
from tests.unit.toy_executor import prompt


def steps_of(scheduler, sequence: Sequence) -> list[dict[Sequence, int]]:
    """The steps until a sequence has ended."""
    steps = []
    while sequence.state != "finished":
        steps.append(step(scheduler))
        scheduler.in_flight.check()
    return steps


def batch(scheduler, count: int, length: int = 100, max_tokens: int = 50) -> list[Sequence]:
    return [arrive(scheduler, 1000 + i, prompt(length, i), priority=IDLE, max_tokens=max_tokens) for i in range(count)]


def test_whoever_comes_runs_as_if_there_were_no_batch():
    alone, shared = make(60), make(60)
    expected = steps_of(alone, arrive(alone, 1, prompt(150, 70), max_tokens=20))
    lines = batch(shared, 30)
    for _ in range(40):
        step(shared)
    assert {line.state for line in lines} >= {"running", "waiting"}
    one = arrive(shared, 1, prompt(150, 70), max_tokens=20)
    steps = steps_of(shared, one)
    assert [chunks[one] for chunks in steps] == [next(iter(chunks.values())) for chunks in expected]
    assert all(set(chunks) == {one} for chunks in steps)
    while shared.in_flight.has_work:
        step(shared)
    assert [line.num_output for line in lines] == [50] * 30
    assert shared.memory.pools[0].num_used == 0


def test_a_steady_stream_keeps_its_steps_beside_a_batch_that_rests():
    scheduler = make(100)
    lines = batch(scheduler, 4)
    for _ in range(20):
        step(scheduler)
    one = arrive(scheduler, 1, prompt(10, 70), max_tokens=30)
    for _ in range(3):
        step(scheduler)
    work = scheduler.schedule()
    assert work.is_steady
    assert set(work.chunks) == {one}
    assert all(line.state == "running" for line in lines)


def test_idle_priority_has_no_turn_for_having_waited():
    scheduler = make(100, patience=50, max_sequences=2)
    (line,) = batch(scheduler, 1)
    for number in range(20):
        arrive(scheduler, number, prompt(30, number), max_tokens=10)
    patient = arrive(scheduler, 99, prompt(30, 99), max_tokens=10, priority=5)
    steps_of(scheduler, patient)
    assert line.num_computed == 0
    steps_of(scheduler, line)


def test_idle_priority_is_in_nobodys_way_in_the_queue():
    scheduler = make(100, max_queue=3, max_sequences=2)
    batch(scheduler, 5)
    step(scheduler)
    assert not scheduler.admission.is_full(10)
    assert scheduler.admission.is_full(10, IDLE)
    for number in range(5):
        arrive(scheduler, number, prompt(10, number), max_tokens=5)
    assert scheduler.admission.is_full(10)


def test_long_prompts_at_idle_priority_take_no_long_steps():
    scheduler = make(1000, max_tokens=512)
    scheduler.pace = Pace(0.1, Prices(step=0.01, token=0.001), 0.0)
    (line,) = batch(scheduler, 1, length=2000)
    assert 10 < step(scheduler)[line] < 95
    (one,) = [arrive(scheduler, 1, prompt(2000, 9), max_tokens=5)]
    assert step(scheduler) == {one: 512}


def test_nor_while_the_urgent_ones_wait_for_something_else_than_a_step():
    scheduler = make(1000, max_tokens=512)
    scheduler.pace = Pace(0.1, Prices(step=0.01, token=0.001), 0.0)
    (line,) = batch(scheduler, 1, length=2000)
    step(scheduler)
    one = arrive(scheduler, 1, prompt(10, 9), max_tokens=5)
    scheduler.commit(scheduler.schedule(), {})
    assert (one.state, one.num_new) == ("running", 0)  # nothing was drawn
    assert 10 < step(scheduler)[line] < 95
