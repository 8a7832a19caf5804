"""Steady steps are kept from one to the next: held, at every step, against what is made anew."""

import random
from dataclasses import replace

import numpy as np
import pytest

from pelton.engine.batch import Row, build
from pelton.engine.engine import Engine
from pelton.engine.kv_memory import KVMemory
from pelton.engine.prefix_cache import first_seen
from pelton.engine.protocol import Streams, Tokens, Unfold
from pelton.engine.work import Work
from pelton.ops.data import BLOCK_TOKENS, I32, Batch
from pelton.request import EngineRequest, TokenEvent
from tests.unit.toy_executor import Transcript, make_engine, prompt, request

WINDOWS = [(None,), (None, 40), (33, None)]


def check_step(engine: Engine, work: Work, inputs: Batch, fresh: Batch) -> None:
    for name in ("ids", "positions", "seq_starts", "logit_rows"):
        np.testing.assert_array_equal(getattr(inputs, name), getattr(fresh, name))
    for table, fresh_table in zip(inputs.tables, fresh.tables, strict=True):
        width = min(table.shape[1], fresh_table.shape[1])
        np.testing.assert_array_equal(table[:, :width], fresh_table[:, :width])
        assert not table[:, width:].any()


def check_what_is_kept(engine: Engine) -> tuple[list[bool], list[bool]]:
    """Hold each step's batch and shape against those of the same sequences made anew. Which steps repeated one, and
    which of them looked at no sequence?"""
    repeated: list[bool] = []
    blind: list[bool] = []
    last: list[Work] = []
    make, schedule, proceed = engine._batches.of, engine.scheduler.schedule, engine.runner.proceed

    def scheduled() -> Work:
        work = schedule()
        repeated.append(work in last)
        last[:] = [work]
        if work.plain is None or len(repeated) % 3 == 0:
            engine.scheduler.steady.settle()
            assert work.shape == Work(work.chunks, work.moves, work.num_bytes).shape
            assert all(engine.memory.has_place(sequence, num) for sequence, num in work.chunks.items())
        return work

    def checked(work: Work) -> tuple[Batch, list[Row]]:
        inputs, rows = make(work)
        fresh, fresh_rows = build(work.chunks, len(engine.memory.windows))
        assert rows == fresh_rows
        check_step(engine, work, inputs, fresh)
        return inputs, rows

    def proceeded(ends: I32) -> bytes | None:
        (work,) = last
        assert work.plain is not None
        blind.append(work.plain.num_behind > 0)
        fresh = None if blind[-1] else build(work.chunks, len(engine.memory.windows))[0]
        drawn = proceed(ends)
        if fresh is not None:
            check_step(engine, work, engine._batches._made[0], fresh)
        return drawn

    engine._batches.of = checked  # type: ignore[method-assign]
    engine.scheduler.schedule = scheduled  # type: ignore[method-assign]
    engine.runner.proceed = proceeded  # type: ignore[method-assign]
    return repeated, blind


def never_steady(engine: Engine) -> None:
    schedule = engine.scheduler.schedule

    def anew() -> Work:
        engine.scheduler.steady.end()
        return replace(schedule(), is_steady=False)

    engine.scheduler.schedule = anew  # type: ignore[method-assign]


def requests_of(source: random.Random) -> list[EngineRequest]:
    kinds: list[dict[str, object]] = [
        {},
        {},
        {"temperature": 1.0},
        {"n": 2},
        {"logprobs": 2},
        {"frequency_penalty": 0.5},
        {"stop_token_ids": (source.randrange(50),)},
        {"min_tokens": 9},
        {"mirostat_mode": 2, "temperature": 1.0},
    ]
    return [
        request(
            f"r{i}",
            prompt(source.randrange(1, 70), source.randrange(3)),
            tenant=f"t{i % 2}",
            priority=i % 3 // 2,
            **{"max_tokens": source.randrange(1, 90), "temperature": 0.0, **source.choice(kinds)},
        )
        for i in range(9)
    ]


def play(engine: Engine, seed: int) -> Transcript:
    """Requests that come and go at steps that the seed names."""
    source, transcript = random.Random(seed), Transcript()
    arrivals = [(source.randrange(0, 120), one) for one in requests_of(source)]
    aborts = {source.randrange(20, 150): f"r{source.randrange(9)}" for _ in range(2)}
    turn = 0
    while turn < 121 or engine.has_work:
        for _, one in (arrival for arrival in arrivals if arrival[0] == turn):
            engine.submit(one)
        if turn in aborts:
            engine.abort(aborts[turn])
        transcript.add(engine.step())
        if turn % 5 == 0:
            engine.check()
        turn += 1
    return transcript


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("settings", [{}, {"speculation": "off", "num_blocks": 14}])
def test_what_is_kept_is_what_is_made_anew(windows: tuple[int | None, ...], seed: int, settings: dict[str, object]):
    engine, _ = make_engine(windows=windows, clock=lambda: 0.0, **settings)  # type: ignore[arg-type]
    repeated, blind = check_what_is_kept(engine)
    transcript = play(engine, seed)
    assert sum(repeated) > 20
    assert "speculation" not in settings or sum(blind) > 10
    other, _ = make_engine(windows=windows, clock=lambda: 0.0, **settings)  # type: ignore[arg-type]
    never_steady(other)
    assert transcript.events == play(other, seed).events
    assert engine.counters == other.counters


def test_streams_are_named_once():
    engine, _ = make_engine(speculation="off")
    for i in range(3):
        engine.submit(request(f"r{i}", prompt(10, i), max_tokens=40, temperature=0.0))
    steps = [engine.step() for _ in range(30)]
    names = [event for events in steps for event in events if isinstance(event, Streams)]
    assert names == [Streams((("r0", 0), ("r1", 0), ("r2", 0)))]
    assert [list(map(type, events)) for events in steps[10:]] == [[Tokens]] * 20
    unfold = Unfold()
    told = [event for events in steps for event in unfold(events) if isinstance(event, TokenEvent)]
    assert [event.request_id for event in told[-3:]] == ["r0", "r1", "r2"]


def test_counters_are_put_off_only_while_nothing_but_tokens_comes():
    now = [0.0]
    engine, _ = make_engine(speculation="off", clock=lambda: now[0])
    engine.submit(request("a", prompt(10), max_tokens=40, temperature=0.0))
    messages = []
    for _ in range(39):
        now[0] += 0.06
        messages.append(engine.message(engine.step()))
    steps = [message.counters.steps for message in messages if message.counters is not None]
    assert 3 <= len(steps) <= 8
    assert engine.message(engine.step()).counters == engine.counters  # the last token ends it


@pytest.mark.parametrize("window", [1, 16, 31, 32, 33, 40, 64, 100])
def test_tables_change_only_in_the_named_phases(window: int):
    memory = KVMemory((None, window), (9, 9), max_chunk=8, is_caching=True)
    changes = [n for n in range(1, 300) if n % BLOCK_TOKENS == 0 or first_seen(n, window) != first_seen(n - 1, window)]
    assert all(n % BLOCK_TOKENS in memory.phases for n in changes)
