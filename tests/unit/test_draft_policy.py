"""When the draft model drafts: the scheduler in a simulated clock, against costs and texts that it is not told."""

from __future__ import annotations

import math
import random
from functools import cache

import pytest

from pelton.engine.draft_guesses import BOUNDS
from pelton.engine.draft_policy import DraftPolicy
from pelton.engine.drafting import Drafting
from pelton.engine.kv_memory import KVMemory
from pelton.engine.pace import Pace, Shape
from pelton.engine.scheduler import Scheduler
from pelton.engine.sequence import Sequence, SequenceGroup
from pelton.engine.shadows import Shadows
from pelton.engine.speculative import Speculation
from pelton.engine.work import Work
from tests.unit.test_speculation import COSTS, NOISE, count
from tests.unit.toy_executor import request

NUM_PROMPT, NUM_OUTPUT, VOCAB = 120, 160, 1 << 20


class Simulation:
    """An engine's life: one load after the other. The target's step costs what `COSTS` say, a run of the draft model
    `weight` times as much; it draws the target's token with the probability `share`, and is the surer the likelier that
    is: `is_sure`, or not at all."""

    def __init__(self, cost: str, share: float | None, weight: float = 0.3, *, is_sure: bool = True) -> None:
        self.rng = random.Random(5)
        self.cost, self.weight = COSTS[cost], weight
        self.share, self.is_sure = share, is_sure
        self.pace = Pace(target=1e6)
        memory, shadowed = (KVMemory((None,), (200,), max_chunk=512, is_caching=False) for _ in range(2))
        self.policy = None
        if share is not None:
            self.policy = DraftPolicy(self.pace, Shadows(shadowed, 10_000), weight=0.8 * weight, max_tokens=256)
        speculation = Speculation(self.pace, self.policy)
        limits = {"max_tokens": 512, "max_sequences": 64, "max_queue": 100}
        self.scheduler = Scheduler(memory, self.pace, speculation=speculation, **limits)
        self.num_loads = 0

    def noisy(self, seconds: float) -> float:
        return seconds * math.exp(self.rng.gauss(0, NOISE))

    def load(self, streams: int = 1, num_output: int = NUM_OUTPUT) -> float:
        """Seconds that all answers take, without the prompts of the target. Texts never repeat themselves."""
        scheduler, seconds = self.scheduler, 0.0
        self.answers: dict[Sequence, list[int]] = {}
        self.num_loads += 1
        source = random.Random(self.num_loads)
        for number in range(streams):
            prompt, answer = ([source.randrange(VOCAB) for _ in range(n)] for n in (NUM_PROMPT, num_output))
            sequence = SequenceGroup(request(str(number), prompt, max_tokens=num_output), number).sequences[0]
            self.answers[sequence] = answer
            scheduler.in_flight.add(sequence)
        while scheduler.in_flight.has_work:
            work = scheduler.schedule()
            if work.drafting is not None and self.policy is not None:
                seconds += self.draft(work, work.drafting, self.policy)
            shape = work.shape
            accepted = {s: count(s, self.answers[s]) for s in work.chunks if s.draft}
            drawing = [s for s, num_tokens in work.chunks.items() if num_tokens >= s.num_new]
            scheduler.commit(work, accepted)
            seconds += self.cost(shape) * (shape.num_tokens == shape.num_rows)
            took = self.noisy(self.cost(shape))
            self.pace.observe(shape, took)
            if self.policy is not None:
                self.policy.stepped(shape, took)
            for sequence in drawing:
                sequence.tokens.append(self.answers[sequence][sequence.num_output])
                if sequence.num_output == num_output:
                    scheduler.in_flight.finish(sequence)
            scheduler.in_flight.check()
        return seconds

    def draft(self, work: Work, drafting: Drafting, policy: DraftPolicy) -> float:
        """What `DraftModel.run` does."""
        shape, spent = work.shape, 0.0
        shadows = {sequence: policy.shadows.get(sequence) for sequence in drafting.chunks}
        run = Shape()
        for sequence, num_tokens in drafting.chunks.items():
            shadow = shadows[sequence]
            assert shadow is not None
            assert shadow.num_computed + num_tokens <= len(shadow.tables[0]) * 32
            end = shadow.num_computed + num_tokens
            assert (end == sequence.num_tokens) == (sequence in drafting.depths)
            run = Shape(
                *(a + b for a, b in zip(run, (num_tokens, end == sequence.num_tokens, end, end, 0), strict=True))
            )
            policy.shadows.memory.commit(shadow, num_tokens)
        active = dict.fromkeys(drafting.depths, 1.0)
        kinds: dict[Sequence, list[int]] = {sequence: [] for sequence in active}
        while True:
            took = self.weight * self.cost(run)
            policy.costs.observe(run, self.noisy(took))
            spent += took
            for sequence in list(active):
                active[sequence] *= self.draw(policy, sequence, kinds[sequence])
                each = took / len(active)
                if len(sequence.draft) == drafting.depths[sequence] or not policy.goes_on(
                    drafting, active[sequence], len(sequence.draft), sequence, each
                ):
                    del active[sequence]
            if not active:
                break
            for sequence in active:
                shadows[sequence].draft.append(sequence.draft[-1])  # type: ignore[union-attr]
            num_read = sum(sequence.num_tokens for sequence in active)
            run = Shape(len(active), len(active), num_read, num_read)
        for sequence in drafting.depths:
            work.chunks[sequence] += len(sequence.draft)
        drafting.seconds = self.noisy(spent)
        policy.drafted(drafting, shape, kinds)
        return spent

    def draw(self, policy: DraftPolicy, sequence: Sequence, kinds: list[int]) -> float:
        """One token more; how likely it is taken to be right."""
        assert self.share is not None
        sureness = self.share
        if self.is_sure and self.share > 0.5:  # half of the tokens are easy
            wrong = (1 - self.share) * (0.2 if self.rng.random() < 0.5 else 1.8)
            sureness = 1 - wrong
        truth = self.answers[sequence][sequence.num_output + len(sequence.draft)]
        sequence.draft.append(truth if self.rng.random() < sureness else VOCAB)
        kind, chance = policy.guesses.sureness(sequence, sureness if self.is_sure else 0.5)
        assert 0 <= kind <= len(BOUNDS)
        kinds.append(kind)
        return chance


@cache
def plain(cost: str, streams: int, num_output: int = NUM_OUTPUT) -> float:
    return Simulation(cost, None).load(streams, num_output)


def step(cost: str, streams: int) -> float:
    shape = Shape(streams, streams, 200 * streams, 200 * streams)
    return COSTS[cost](shape)


@pytest.mark.parametrize("share", [0.0, 0.7, 0.95])
@pytest.mark.parametrize(("weight", "streams"), [(0.1, 1), (0.4, 1), (1.2, 1), (0.1, 3)])
@pytest.mark.parametrize("cost", ["small", "rows are free", "a cliff behind one"])
def test_never_slower_than_plain(cost: str, share: float, weight: float, streams: int):
    """But for what finding out costs, once, at an engine's beginning."""
    engine = Simulation(cost, share, weight)
    times = [engine.load(streams) for _ in range(4)]
    assert sum(times[:2]) <= 2 * plain(cost, streams) / 0.97 + 17 * step(cost, streams)
    assert sum(times[2:]) <= 2 * plain(cost, streams) / 0.95


@pytest.mark.parametrize("is_sure", [False, True])
@pytest.mark.parametrize("cost", ["rows are free", "bound by memory"])
def test_drafts_where_rows_cost_little(cost: str, is_sure: bool):
    engine = Simulation(cost, 0.9, 0.1, is_sure=is_sure)
    times = [engine.load() for _ in range(5)]
    assert times[0] < plain(cost, 1)
    assert times[-1] < plain(cost, 1) / 2.2


def test_short_answers_to_long_prompts_do_not_pay_for_the_reading():
    engine = Simulation("bound by memory", 0.9, 0.3)
    for _ in range(3):
        engine.load()
    for _ in range(40):  # it learns how long answers are
        engine.load(num_output=8)
    times = [engine.load(num_output=8) for _ in range(20)]
    assert sum(times) <= 20 * plain("bound by memory", 1, 8) / 0.95


def test_a_model_that_ceases_to_be_right_is_left_alone_and_tried_again():
    engine = Simulation("rows are free", 0.95, 0.1)
    fast = [engine.load() for _ in range(3)][-1]
    engine.share = 0.0
    slow = [engine.load() for _ in range(6)]
    assert sum(slow) <= 6 * plain("rows are free", 1) / 0.95
    engine.share = 0.95
    assert min(engine.load() for _ in range(20)) < 1.3 * fast
