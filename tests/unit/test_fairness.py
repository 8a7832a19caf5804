"""Priorities and tenants: whose turn it is, simulated over thousands of requests."""

from __future__ import annotations

import random
from collections import Counter

from pelton.engine.batch import rows_of
from pelton.engine.fairness import KEPT, OUTPUT, Shares
from pelton.engine.kv_memory import KVMemory
from pelton.engine.pace import Pace
from pelton.engine.scheduler import Scheduler
from pelton.engine.sequence import URGENT, Sequence, SequenceGroup
from pelton.engine.waiting import WaitingQueue
from tests.unit.toy_executor import Transcript, make_engine, prompt, request, run

BODY = [7] * 4096


class Simulation:
    """Every row draws token 1; a sequence ends at its max_tokens."""

    def __init__(self, *, num_blocks: int = 2000, **limits: int) -> None:
        settings = {"max_tokens": 64, "max_sequences": 4, "max_queue": 10**6, **limits}
        memory = KVMemory((None,), (num_blocks,), max_chunk=settings["max_tokens"], is_caching=False)
        self.scheduler = Scheduler(memory, Pace(1e6), **settings)
        self.num = 0
        self.served: Counter[str] = Counter()
        self.started: list[Sequence] = []

    def arrive(self, length: int, max_tokens: int, tenant: str = "", priority: int = 0) -> Sequence:
        self.num += 1
        one = request(str(self.num), BODY[:length], max_tokens=max_tokens, tenant=tenant, priority=priority)
        sequence = SequenceGroup(one, self.num).sequences[0]
        self.scheduler.in_flight.add(sequence)
        return sequence

    def step(self) -> None:
        known = set(self.scheduler.in_flight.running)
        work = self.scheduler.schedule()
        self.started += [s for s in self.scheduler.in_flight.running if s not in known]
        chunks = dict(work.chunks)
        rows = [row for sequence, count in chunks.items() for _, row in rows_of(sequence, count)]
        for sequence, count in chunks.items():
            self.served[sequence.group.tenant] += count if sequence.num_new > 1 else 0
        self.scheduler.commit(work, {})
        for sequence, *_ in rows:
            self.served[sequence.group.tenant] += OUTPUT
            sequence.tokens.append(1)
            if sequence.num_output == sequence.group.request.sampling.max_tokens:
                self.scheduler.in_flight.finish(sequence)

    def finish(self) -> None:
        while self.scheduler.in_flight.has_work:
            self.step()


def test_the_lower_number_is_first_then_the_older():
    run = Simulation(max_sequences=1)
    asked = [run.arrive(10, 2, priority=priority) for priority in (3, 0, -5, 0, 3)]
    run.finish()
    assert run.started == [asked[i] for i in (2, 1, 3, 0, 4)]


def test_thousands_of_requests_of_two_tenants_are_shared_by_tokens_not_by_requests():
    run, rng = Simulation(max_sequences=16, max_tokens=512), random.Random(1)
    for _ in range(2000):  # one that asks for much, in many requests
        run.arrive(rng.randrange(100, 400), rng.randrange(20, 60), "greedy")
    modest = [(rng.randrange(5, 40), rng.randrange(1, 10)) for _ in range(2000)]
    for length, max_tokens in modest:
        run.arrive(length, max_tokens, "modest")
    most = 16 * (400 + OUTPUT * 60)  # all that runs at once
    waiting = run.scheduler.in_flight.waiting
    while any(s.group.tenant == "modest" for s in waiting):
        for _ in range(20):
            run.step()
        assert abs(run.served["greedy"] - run.served["modest"]) <= most
    assert run.served["modest"] > 40_000
    run.scheduler.in_flight.check()


def test_a_newcomer_waits_for_no_tenants_backlog():
    run = Simulation(max_sequences=1)
    for _ in range(500):
        run.arrive(100, 20, "flood")
    for _ in range(400):
        run.step()
    late = run.arrive(100, 20, "newcomer")
    before = len(run.started)
    while late not in run.started:
        run.step()
    assert len(run.started) - before <= 2


def test_a_pause_saves_nothing_up():
    run = Simulation(max_sequences=1)
    run.arrive(10, 2, "sleeper")
    run.finish()
    for _ in range(200):
        run.arrive(50, 10, "awake")
    for _ in range(900):
        run.step()
    done = len(run.started)
    for _ in range(50):
        run.arrive(50, 10, "sleeper")
    while len(run.started) < done + 40:
        run.step()
    tenants = Counter(s.group.tenant for s in run.started[done:])
    assert abs(tenants["sleeper"] - tenants["awake"]) <= 2


def test_a_priority_has_a_turn_whatever_else_comes():
    patience = 2000
    run = Simulation(patience=patience)
    waiting = run.scheduler.in_flight.waiting
    low = [run.arrive(100, 5, priority=9) for _ in range(3)]
    arrived, turns = waiting.num_computed, []
    while any(s.state != "finished" for s in low):
        while len(waiting) < 20:
            run.arrive(100, 20, priority=0)
        run.step()
        for sequence in low:
            if sequence.state == "running" and sequence not in [s for s, _ in turns]:
                turns.append((sequence, waiting.num_computed - arrived))
        assert waiting.num_computed < 100_000, "they starve"
    assert [s for s, _ in turns] == low
    place = 4 * (100 + 20) + 64  # until one that runs has ended
    for turn, (_, when) in enumerate(turns, 1):
        assert when <= turn * (patience + place)
    assert all(s.rank == URGENT for s in low)


def test_the_urgent_displace_the_least_urgent_and_only_as_many_as_they_need():
    run = Simulation()
    low = [run.arrive(20, 100, priority=p) for p in (1, 2, 2, 3)]
    run.step()
    urgent = run.arrive(20, 5, priority=0)
    same = run.arrive(20, 5, priority=2)
    run.step()
    assert urgent.state == "running"
    assert [s.state for s in (*low, same)] == ["running", "running", "running", "waiting", "waiting"]
    run.finish()
    assert run.scheduler.admission.num_preempted == 1
    assert [s.num_output for s in low] == [100] * 4


def test_the_urgent_displace_for_memory():
    run = Simulation(num_blocks=12)  # 11 blocks
    low = run.arrive(300, 30, priority=1)
    for _ in range(8):
        run.step()
    assert low.num_output
    urgent = run.arrive(100, 3)
    run.step()
    assert (urgent.state, low.state) == ("running", "waiting")
    run.finish()
    assert low.num_output == 30


def test_the_worst_priority_is_preempted_first_and_prefills_by_priority():
    run = Simulation(num_blocks=8, max_sequences=3)  # 7 blocks
    low, old, young = (run.arrive(60, 100, priority=p) for p in (1, 0, 0))
    run.step()
    while not run.scheduler.admission.num_preempted:
        run.step()
    assert [s.state for s in (low, old, young)] == ["waiting", "running", "running"]
    run.finish()


def test_what_was_displaced_gives_the_same_answer():
    def asked(id: str, priority: int):
        return request(id, prompt(90, 3), max_tokens=60, temperature=1.0, n=2, priority=priority, tenant=id)

    engine, _ = make_engine()
    alone = run(engine, [asked("low", 5)]).answers("low")
    engine, _ = make_engine(max_sequences=4, prefix_cache=False)
    transcript = Transcript()
    for one in (asked("low", 5), asked("high", 0), asked("higher", -1)):
        engine.submit(one)
    for number in range(4):
        for _ in range(9):
            transcript.add(engine.step())
        engine.submit(asked(f"highest {number}", -2))
    run(engine, transcript=transcript)
    assert engine.counters.preempted
    assert transcript.answers("low") == alone


def test_counters_of_tenants_that_left_are_forgotten():
    shares = Shares()
    for number in range(10 * KEPT):
        tenant = f"t{number}"
        shares.enter(tenant, [])
        shares.choose(tenant, [tenant])
        shares.charge(tenant, 5)
    assert len(shares) <= 2 * KEPT + 1


def test_the_queue_counts_what_waits():
    queue = WaitingQueue(100)
    sequences = [SequenceGroup(request(str(i), BODY[: 10 + i], priority=i % 2), i).sequences[0] for i in range(4)]
    for sequence in sequences:
        queue.add(sequence)
    assert (len(queue), queue.num_tokens) == (4, 46)
    queue.remove(sequences[1])
    queue.admit(queue.first(), 10)
    assert list(queue) == [sequences[2], sequences[3]]
    queue.put_back(sequences[0])
    assert queue.first() is sequences[0]
    assert (len(queue), queue.num_tokens) == (3, 35)


def test_the_queue_is_bounded_in_tokens_too():
    run = Simulation(max_sequences=1, max_queue_tokens=1000)
    scheduler = run.scheduler
    assert not scheduler.admission.is_full(5000)  # it would run at once
    run.arrive(100, 50)
    run.step()
    assert not scheduler.admission.is_full(5000)  # the only one
    run.arrive(600, 5)
    assert not scheduler.admission.is_full(400)
    assert scheduler.admission.is_full(401)
