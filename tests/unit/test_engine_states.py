"""Whatever comes in whatever order: submissions, aborts, steps, timeouts, and steps that fail, in little memory. Every
block is accounted for at all times, every request ends once, and who was let go on has the answer that it has alone."""

from __future__ import annotations

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pelton.request import IDLE, Done, ErrorEvent, Finish
from tests.unit.alone import alone
from tests.unit.toy_executor import Transcript, make_engine, prompt, request

WINDOWS = (None, 40)
KINDS = [
    request("", prompt(length, start), n=n, max_tokens=max_tokens, temperature=float(n > 1), end_ids=(3,))
    for length, start in ((1, 0), (33, 0), (64, 0), (100, 0), (100, 1), (130, 1))
    for n, max_tokens in ((1, 1), (1, 60), (3, 40))
]
KINDS.append(request("", prompt(40, 2), n=2, use_beam_search=True, beam_width=3, max_tokens=30, end_ids=(3,)))
KINDS += [
    request("", prompt(length, start), pooling=pooling)
    for length, start in ((1, 0), (64, 0), (100, 1), (130, 0))
    for pooling in ("last", "mean", "cls")
]
NUMBERS = st.integers(0, 1 << 16)


def _kind(number):
    return KINDS[number]


ANY_KIND = st.integers(0, len(KINDS) - 1).map(_kind)


class Requests(RuleBasedStateMachine):
    """One engine, from its start to its last event."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.engine, self.executor = make_engine(
            windows=WINDOWS,
            num_blocks=(9, 9),
            swap=2000,
            max_batch_tokens=48,
            max_sequences=4,
            max_queue=6,
            max_queue_tokens=500,
            patience=300,
            request_timeout=1000.0,
            clock=self._clock,
        )
        self.transcript = Transcript()
        self.asked: dict[str, msgspec.Struct] = {}
        self.kept: set[str] = set()
        """Those that nobody has ended, nor a fault."""

    def _clock(self) -> float:
        self.now += 0.01
        return self.now

    def _open(self) -> list[str]:
        return [id for id in self.asked if id in self.engine._answers.groups]

    @rule(kind=ANY_KIND, priority=st.sampled_from([0, 0, 1, 5, IDLE]), tenant=st.sampled_from("abc"))
    def submit(self, kind, priority, tenant):
        self._submit(kind, priority, tenant)

    @rule(kinds=st.lists(ANY_KIND, min_size=3, max_size=5), count=st.integers(10, 60))
    def crowd(self, kinds, count):
        """Enough at once for memory to run out."""
        for number, kind in enumerate(kinds):
            self._submit(kind, -number, "crowd")
            self.step(count // 10)
        self.step(count)

    def _submit(self, kind, priority, tenant):
        id = str(len(self.asked))
        self.asked[id] = msgspec.structs.replace(kind, id=id)
        self.kept.add(id)
        self.engine.submit(msgspec.structs.replace(kind, id=id, priority=priority, tenant=tenant))

    @precondition(lambda self: self.engine._answers.groups)
    @rule(number=NUMBERS, choice=st.sampled_from([None, None, 0, 1, 2]))
    def abort(self, number, choice):
        id = self._open()[number % len(self._open())]
        group = self.engine._answers.groups[id]
        held = [s for s in group.sequences if choice in (None, s.choice)]
        self.kept.discard(id)
        self.engine.abort(id, choice)
        assert all(s.state == "finished" and not s.tables and s.saved is None for s in held)

    @rule(count=st.integers(1, 12))
    def step(self, count):
        for _ in range(count):
            self.transcript.add(self.engine.advance())
            self.engine.check()

    @precondition(lambda self: self.engine.scheduler.in_flight.has_work)
    @rule()
    def fault(self):
        """Whoever was in flight ends with an error; the engine goes on."""
        self.executor.fail_next = True
        before = set(self._open())
        self.transcript.add(self.engine.advance())
        if not self.executor.fail_next:
            self.kept -= before
            assert not self.engine.scheduler.in_flight.has_work
        self.executor.fail_next = False

    @rule()
    def time_passes(self):
        self.now += 400

    @invariant()
    def nothing_is_lost(self):
        self.engine.check()

    def teardown(self):
        while self.engine.has_work:
            self.transcript.add(self.engine.step())
            self.engine.check()
        assert self.engine.counters.kv_blocks_used == 0
        for id, one in self.asked.items():
            last = self.transcript.last(id)
            assert isinstance(last, Done | ErrorEvent)
            if isinstance(last, ErrorEvent):
                assert last.kind in {"Overloaded", "InternalError", "TimedOut"}
            elif id in self.kept:
                assert self.transcript.answers(id) == [
                    _named(event, id) for event in alone(msgspec.structs.replace(one, id=""), WINDOWS)
                ]
            finishes = [e.choice for e in self.transcript.events[id] if isinstance(e, Finish)]
            assert len(finishes) == len(set(finishes))
            assert isinstance(last, ErrorEvent) or len(finishes) == one.sampling.n


def _named(event, id):
    return msgspec.structs.replace(event, request_id=id)


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
