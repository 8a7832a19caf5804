"""The scheduler alone: pure policy, simulated over thousands of requests."""

from __future__ import annotations

import random
from array import array
from collections.abc import Mapping

from pelton.engine.batch import rows_of
from pelton.engine.kv_memory import KVMemory
from pelton.engine.pace import Pace, Shape
from pelton.engine.scheduler import Scheduler
from pelton.engine.sequence import Sequence, SequenceGroup
from pelton.engine.speculative import Speculation
from pelton.ops.data import BLOCK_TOKENS
from tests.unit.toy_executor import prompt, request


def make(num_blocks: int = 100, *, is_caching: bool = True, **limits: int) -> Scheduler:
    settings = {"max_tokens": 64, "max_sequences": 8, "max_queue": 10_000, **limits}
    memory = KVMemory((None,), (num_blocks,), max_chunk=settings["max_tokens"], is_caching=is_caching)
    return Scheduler(memory, Pace(1e6), **settings)


def arrive(scheduler: Scheduler, number: int, tokens: list[int], **params: int) -> Sequence:
    sequence = SequenceGroup(request(str(number), tokens, **params), number).sequences[0]
    scheduler.in_flight.add(sequence)
    return sequence


def step(scheduler: Scheduler) -> dict[Sequence, int]:
    """One step in which every row draws token 1; a sequence ends at its max_tokens."""
    work = scheduler.schedule()
    assert sum(work.chunks.values()) <= scheduler.max_tokens
    assert sum(s.num_slots for s in scheduler.in_flight.running) <= scheduler.admission.max_sequences
    chunks = dict(work.chunks)
    rows = [row for sequence, num_tokens in chunks.items() for _, row in rows_of(sequence, num_tokens)]
    scheduler.commit(work, {})
    for sequence, _, _ in rows:
        sequence.tokens.append(1)
        if sequence.num_output == sequence.group.request.sampling.max_tokens:
            scheduler.in_flight.finish(sequence)
    return chunks


def test_thousands_of_requests_all_end_oldest_admitted_first():
    rng = random.Random(1)
    scheduler = make(30)
    groups: list[SequenceGroup] = []
    first_run: list[int] = []
    for number in range(3000):
        one = request(str(number), prompt(rng.randrange(1, 200), rng.randrange(20)), max_tokens=rng.randrange(1, 20))
        group = SequenceGroup(one, number)
        groups.append(group)
        scheduler.in_flight.add(group.sequences[0])
    admitted: set[int] = set()
    steps = 0
    while scheduler.in_flight.has_work:
        step(scheduler)
        steps += 1
        new = sorted({s.group.arrival for s in scheduler.in_flight.running} - admitted)
        admitted |= set(new)
        first_run += new
        if steps % 50 == 0:
            scheduler.in_flight.check()
    assert first_run == sorted(first_run)
    assert all(group.is_finished for group in groups)
    assert scheduler.memory.pools[0].num_used == 0
    scheduler.in_flight.check()


def test_decodes_come_first_and_prefill_fills_the_rest():
    scheduler = make(1000)
    decoding = [arrive(scheduler, i, prompt(4, i), max_tokens=500) for i in range(3)]
    step(scheduler)
    huge = arrive(scheduler, 9, prompt(2000, 9))
    for _ in range(20):
        chunks = step(scheduler)
        assert [chunks[s] for s in decoding] == [1, 1, 1]
        assert chunks[huge] == 61


def test_the_oldest_prefill_keeps_a_quarter_and_the_shortest_goes_first():
    scheduler = make(1000)
    huge = arrive(scheduler, 0, prompt(2000, 1))
    middle = arrive(scheduler, 1, prompt(500, 2))
    short = arrive(scheduler, 2, prompt(30, 3))
    assert step(scheduler) == {short: 30, middle: 18, huge: 16}


def test_the_youngest_is_preempted_and_comes_back_first():
    scheduler = make(8, is_caching=False, max_sequences=3)  # 7 blocks
    old, middle, young = (arrive(scheduler, i, prompt(60, i), max_tokens=100) for i in range(3))
    for _ in range(3):
        step(scheduler)
    late = arrive(scheduler, 3, prompt(5, 3))
    while not scheduler.admission.num_preempted:
        step(scheduler)
    assert [s.state for s in (old, middle, young)] == ["running", "running", "waiting"]
    assert list(scheduler.in_flight.waiting) == [young, late]
    assert young.num_computed == 0
    assert young.num_output > 0
    while scheduler.in_flight.has_work:
        step(scheduler)
    assert scheduler.memory.pools[0].num_used == 0


def test_a_prompt_waits_for_all_the_memory_that_it_needs():
    scheduler = make(11, is_caching=False)  # 10 blocks
    first = arrive(scheduler, 0, prompt(200, 0), max_tokens=5)  # 7 blocks
    second = arrive(scheduler, 1, prompt(150, 1), max_tokens=5)  # 5 blocks
    step(scheduler)
    assert second.state == "waiting"
    while first.state == "running":
        step(scheduler)
    step(scheduler)
    assert second.state == "running"


def test_choices_take_slots_from_the_start():
    scheduler = make(max_sequences=4)
    many = arrive(scheduler, 0, prompt(100), n=3)
    other = arrive(scheduler, 1, prompt(10, 1), n=2)
    step(scheduler)
    assert many.state == "running"
    assert other.state == "waiting"


def test_the_queue_counts_free_places_too():
    scheduler = make(max_sequences=2, max_queue=1)
    for number in range(3):
        assert not scheduler.admission.is_full(5)
        arrive(scheduler, number, prompt(5, number))
    assert scheduler.admission.is_full(5)
    step(scheduler)
    assert scheduler.admission.is_full(5)


class Drafts(Speculation):
    """Drafts the same three tokens for everybody, while it is to."""

    is_on = False

    def draft(self, shape: Shape, sequences: Mapping[Sequence, int], spare: int) -> None:
        for sequence in sequences if self.is_on else ():
            sequence.draft = array("i", (5, 6, 7))


def test_a_draft_that_finds_no_room_is_none_of_a_later_step():
    scheduler = make(3, is_caching=False)
    scheduler.drafts.speculation = drafts = Drafts(scheduler.pace)
    both = [arrive(scheduler, i, prompt(20, i), max_tokens=50) for i in range(2)]
    while any(each.num_computed < BLOCK_TOKENS - 1 for each in both):
        step(scheduler)
    drafts.is_on = True
    assert step(scheduler) == dict.fromkeys(both, 1)
    assert not any(each.draft for each in both)


def test_one_that_stands_still_goes_on_as_soon_as_there_is_memory():
    scheduler = make(4, is_caching=False)
    (pool,) = scheduler.memory.pools
    taken = pool.allocate()
    one, other = (arrive(scheduler, i, prompt(length, i), max_tokens=60) for i, length in enumerate((4, 28)))
    while other in step(scheduler):
        pass
    assert step(scheduler) == {one: 1}
    pool.give(taken)
    assert step(scheduler) == {one: 1, other: 1}
