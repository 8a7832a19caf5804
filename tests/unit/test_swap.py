"""Preempted sequences in host memory: when it is worth it, how much of it, and nothing lost."""

from __future__ import annotations

import pytest

from pelton.engine.kv_memory import KVMemory, Match
from pelton.engine.pace import Pace, Prices
from pelton.engine.sequence import Sequence, SequenceGroup
from pelton.ops.data import NULL_BLOCK
from pelton.request import Finish
from tests.unit.alone import GROUPS, alone
from tests.unit.toy_executor import Transcript, make_engine, prompt, request, run

LONG = request("long", prompt(150, 1), max_tokens=60, temperature=1.0, priority=1)
URGENT = request("urgent", prompt(100, 2), max_tokens=20)


def displaced(windows=(None,), until=30, swap=10_000, **settings):
    """An engine in which LONG was just preempted for URGENT, after so many steps."""
    blocks = tuple(12 if window is None else 14 for window in windows)
    engine, executor = make_engine(windows=windows, num_blocks=blocks, swap=swap, max_sequences=1, **settings)
    engine.pace = engine.scheduler.pace = engine.scheduler.admission.pace = Pace(prices=Prices())
    transcript = Transcript()
    engine.submit(LONG)
    for _ in range(until):
        transcript.add(engine.step())
    engine.submit(URGENT)
    transcript.add(engine.step())
    engine.check()
    (sequence,) = engine._answers.groups["long"].sequences
    assert sequence.state == "waiting"
    return engine, executor, transcript, sequence


@pytest.mark.parametrize("windows", GROUPS)
@pytest.mark.parametrize("until", [1, 3, 30])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_it_goes_on_where_it_was(windows, until, prefix_cache):
    engine, executor, transcript, sequence = displaced(windows, until, prefix_cache=prefix_cache)
    assert sequence.saved is not None
    computed = sum(len(step.ids) for step in executor.steps)
    run(engine, transcript=transcript)
    after = sum(len(step.ids) for step in executor.steps) - computed
    assert transcript.answers("long") == alone(LONG, windows)
    assert transcript.answers("urgent") == alone(URGENT, windows)
    assert after <= 150 - 64 * min(until, 3) + 60 + 36 + 20 + 64  # nothing was computed twice
    assert engine.counters.swapped == 1


@pytest.mark.parametrize(("byte", "swapped"), [(1e-9, 1), (1.0, 0)])
def test_the_faster_way_is_taken(byte, swapped):
    engine, _ = make_engine(swap=10_000, max_sequences=1)
    engine.scheduler.admission.pace = Pace(prices=Prices(byte=byte))
    transcript = Transcript()
    for one in (LONG, URGENT):
        engine.submit(one)
        transcript.add(engine.step())
    run(engine, transcript=transcript)
    assert (engine.counters.preempted, engine.counters.swapped) == (1, swapped)
    assert transcript.answers("long") == alone(LONG)


@pytest.mark.parametrize("swap", [0, 399, 400])
def test_host_memory_is_bounded(swap):
    engine, _, transcript, sequence = displaced(until=1, swap=swap, max_batch_tokens=128)
    assert (sequence.saved is not None) == (swap == 400)  # 4 blocks of 100 bytes
    run(engine, transcript=transcript)
    assert transcript.answers("long") == alone(LONG)


def test_what_ends_in_host_memory_is_given_back():
    engine, _, transcript, sequence = displaced()
    engine.abort("long")
    engine.check()
    assert sequence.saved is None
    run(engine, transcript=transcript)
    assert Finish("long", 0, "abort") in transcript.events["long"]


def test_a_choice_inherits_what_its_parent_had():
    engine, executor = make_engine(swap=10_000, max_sequences=3)
    asked = request("a", prompt(500, 1), n=3, temperature=1.0, priority=1)
    transcript = Transcript()
    engine.submit(asked)
    for _ in range(4):
        transcript.add(engine.step())
    engine.submit(URGENT)
    transcript.add(engine.step())
    assert engine.counters.swapped == 1
    engine.abort("a", 0)
    engine.check()
    run(engine, transcript=transcript)
    assert [e for e in transcript.answers("a") if e.choice] == [e for e in alone(asked) if e.choice]
    assert sum(len(step.ids) for step in executor.steps) < 500 + 100 + 2 * 64 + 60


def resumed(memory: KVMemory, tokens: list[int], num_saved: int) -> tuple[Sequence, Match]:
    """A sequence of which so many tokens were saved when it was preempted, and what the cache has for it now."""
    sequence = SequenceGroup(request("resumed", tokens), 9).sequences[0]
    memory.attach(sequence, Match([], 0))
    memory.grow(sequence, num_saved)
    memory.commit(sequence, num_saved)
    assert memory.save(sequence, 1.0, 0.0)
    memory.release(sequence)
    memory.clear_cache()
    cached = SequenceGroup(request("cached", [*tokens[:72], -1]), 1).sequences[0]
    memory.attach(cached, Match([], 0))
    memory.grow(cached, 72)
    memory.commit(cached, 72)
    memory.publish_tail(cached)
    memory.release(cached)
    match = memory.match(sequence)
    assert match.length == 72
    return sequence, match


def test_of_a_match_that_is_left_for_what_was_saved_only_what_is_seen_is_taken():
    """After 72 tokens a window of 40 does not see the first block any more; after the two whole blocks it would."""
    memory = KVMemory((None, 40), (20, 20), max_chunk=64, is_caching=True, block_bytes=(100, 100), host_bytes=10_000)
    sequence, match = resumed(memory, prompt(200), 90)
    memory.cache.evict(1, match.nodes[0].blocks[1])
    match = memory.match(sequence)
    assert (match.length, match.nodes[0].blocks[1]) == (72, NULL_BLOCK)
    assert memory.can_admit(sequence, match, [])
    memory.attach(sequence, match)
    memory.check([sequence])
    assert sequence.num_computed == 90


def test_what_comes_back_fits_where_windows_have_passed_a_match_that_others_hold():
    """The match's blocks are no help to a window that has passed them."""
    memory = KVMemory((None, 70), (20, 20), max_chunk=8, is_caching=True, block_bytes=(100, 100), host_bytes=10_000)
    sequence, match = resumed(memory, prompt(200), 170)
    other = SequenceGroup(request("other", [*prompt(200)[:72], -2]), 2).sequences[0]
    memory.attach(other, memory.match(other))
    held = [memory.pools[1].allocate() for _ in range(memory.pools[1].num_available)]
    while not memory.can_admit(sequence, match, []):
        memory.pools[1].give(held.pop())
    memory.attach(sequence, match)
    assert sequence.num_computed == 170


def test_what_comes_from_disk_fits_there_too():
    memory = KVMemory((None, 70), (20, 20), max_chunk=8, is_caching=True, block_bytes=(100, 100), host_bytes=10_000)
    sequence, match = resumed(memory, prompt(200), 40)
    memory.forget_saved(sequence)
    other = SequenceGroup(request("other", [*prompt(200)[:72], -2]), 2).sequences[0]
    memory.attach(other, memory.match(other))
    held = [memory.pools[1].allocate() for _ in range(memory.pools[1].num_available)]
    while not memory.can_admit(sequence, match, [], 160):
        memory.pools[1].give(held.pop())
    assert memory.set_aside(sequence, match, 5).end == 5
