"""The step-cost model, against costs that it is not told, and the gaps between tokens in a simulated clock."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable

import pytest

from pelton.engine.batch import rows_of
from pelton.engine.kv_memory import KVMemory
from pelton.engine.pace import LEAST, MARGIN, PLAIN_STEPS, TARGET, Pace, Prices, Shape, num_pairs
from pelton.engine.scheduler import Scheduler
from pelton.engine.sequence import Sequence, SequenceGroup
from pelton.engine.work import Work
from tests.unit.toy_executor import prompt, request

Cost = Callable[[Shape], float]
SMALL = Prices(step=8e-3, token=1.4e-3, row=4e-4, read=3e-7, pair=1e-7)
LARGE = Prices(step=0.19, token=0.045, row=4e-3, read=2e-6, pair=6e-7)
WIDE = Prices(step=0.02, token=1e-4, row=1e-4, read=2e-6, pair=1e-9)  # arithmetic is cheap, memory is not


def cost(prices: Prices) -> Cost:
    return Pace(prices=prices).predict


def bound_by_memory(shape: Shape) -> float:
    """Not a sum: few tokens cost nothing beside the weights that are read for them."""
    return max(0.02, 1e-3 * shape.num_tokens + 3e-4 * shape.num_rows) + 2e-7 * shape.num_pairs


def mixed_steps(rng: random.Random, count: int) -> list[Shape]:
    shapes = []
    for _ in range(count):
        rows, context = rng.randrange(1, 33), rng.randrange(20, 1500)
        chunk, start = rng.choice([0, 0, rng.randrange(1, 400)]), rng.randrange(3000)
        pairs = rows * context + num_pairs(start, chunk)
        read = rows * context + (start + chunk if chunk else 0)
        shapes.append(Shape(rows + chunk, rows, read, pairs))
    return shapes


@pytest.mark.parametrize("prices", [SMALL, LARGE, WIDE])
def test_it_learns_prices_from_the_steps_that_run(prices):
    pace, true = Pace(), cost(prices)
    rng = random.Random(1)
    for shape in mixed_steps(rng, 400):
        pace.observe(shape, true(shape))
    errors = [abs(math.log(pace.predict(s) / true(s))) for s in mixed_steps(rng, 200)]
    assert sorted(errors)[180] < 0.1
    assert pace.spread < 0.1


def test_the_first_observation_sets_the_scale():
    pace = Pace()
    shape = Shape(1, 1, 30, 30)
    pace.observe(shape, 3.0)
    assert pace.predict(shape) == pytest.approx(3.0)
    assert pace.prices.token > 0.3


def test_an_outlier_moves_little_and_a_slow_phase_is_followed():
    pace = Pace(prices=SMALL)
    true, shape = cost(SMALL), Shape(40, 8, 1000, 9000)
    pace.observe(shape, 20 * true(shape))
    assert pace.predict(shape) < 1.2 * true(shape)
    for _ in range(12):
        pace.observe(shape, 2 * true(shape))
    assert pace.predict(shape) > 1.8 * true(shape)
    for _ in range(12):
        pace.observe(shape, true(shape))
    assert pace.predict(shape) < 1.2 * true(shape)


def test_nothing_but_the_observations_decides():
    def learn() -> Pace:
        pace, rng = Pace(), random.Random(3)
        for shape in mixed_steps(rng, 50):
            pace.observe(shape, cost(LARGE)(shape) * rng.uniform(0.5, 2))
        pace.observe(Shape(), 1.0)
        pace.observe(Shape(1, 1, 1, 1), 0.0)
        return pace

    one, other = learn(), learn()
    assert (one.prices, one.spread) == (other.prices, other.spread)
    assert all(price > 0 for price in one.prices)


@pytest.mark.parametrize("prices", [SMALL, LARGE, WIDE])
def test_a_chunk_within_a_time_is_the_longest(prices):
    pace = Pace(prices=prices)
    for start in (0, 100, 5000):
        for seconds in (0.001, 0.05, 0.4, 3.0):
            size = pace.chunk_within(seconds, start)
            assert size == 0 or pace.chunk_seconds(start, size) <= seconds * (1 + 1e-9)
            assert pace.chunk_seconds(start, size + 1) > seconds * (1 - 1e-9)
    assert pace.chunk_within(math.inf, 100) > 1 << 20


def test_the_target_by_itself_and_when_set():
    def limit(target: float, plain: float, spread: float = 0.0) -> float:
        shape = Shape(4, 4, 0, 0)
        pace = Pace(target, Prices(step=0.0, token=plain / 4, row=0.0), spread)
        return pace.spare(shape, 0) + pace.predict(shape)

    assert limit(0, 0.001) == pytest.approx(TARGET)
    assert limit(0, 1.0) == pytest.approx(PLAIN_STEPS)
    assert limit(0.2, 0.001) == pytest.approx(0.2)
    assert limit(0.2, 1.0) == pytest.approx(LEAST)
    assert limit(0.2, 0.001, spread=0.25) == pytest.approx(0.2 / (1 + MARGIN / 4))
    pace = Pace(0.2, Prices(), 0.0)
    assert pace.spare(Shape(1, 1, 9, 9), 0) - pace.spare(Shape(1, 1, 9, 9), 1 << 20) == pytest.approx(1e-9 * (1 << 20))


def test_a_dear_prompt_does_not_raise_the_target_for_itself():
    """Prefill turns out ten times as dear as it was learned to be: plain steps are known to cost what they did."""
    pace, plain, mixed = Pace(prices=SMALL), Shape(16, 16, 4000, 4000), Shape(56, 16, 8000, 164_000)
    dear = 10 * pace.predict(mixed)
    limit = PLAIN_STEPS * pace.predict(plain)
    for _ in range(100):
        pace.observe(mixed, dear)
        assert pace.spare(plain, 0) >= (LEAST - 1) * limit / PLAIN_STEPS * (1 - 1e-9)  # it gets on nevertheless
    assert pace.spare(plain, 0) == pytest.approx((LEAST - 1) * limit / PLAIN_STEPS)


class Simulation:
    """A scheduler whose steps take the time that a cost function says."""

    def __init__(self, pace: Pace, true: Cost, seed: int = 1, **limits: int) -> None:
        settings = {"max_tokens": 512, "max_sequences": 64, "max_queue": 10**6, **limits}
        memory = KVMemory((None,), (20_000,), max_chunk=settings["max_tokens"], is_caching=False)
        self.scheduler = Scheduler(memory, pace, **settings)
        self.true = true
        self.rng = random.Random(seed)
        self.now = 0.0
        self.last: dict[Sequence, float] = {}
        self.gaps: list[float] = []
        self.limits: list[float] = []
        """What each gap may be at the most, unless a target is set."""
        self.plain: list[float] = []
        self.num = 0

    def arrive(self, length: int, max_tokens: int) -> Sequence:
        self.num += 1
        one = request(str(self.num), prompt(1) * length, max_tokens=max_tokens)
        sequence = SequenceGroup(one, self.num).sequences[0]
        self.scheduler.in_flight.add(sequence)
        return sequence

    def step(self) -> Work:
        work = self.scheduler.schedule()
        shape = work.shape
        rows = [row for sequence, num_tokens in work.chunks.items() for _, row in rows_of(sequence, num_tokens)]
        assert shape.num_rows == len(rows)
        seconds = self.true(shape)
        decodes = Work({s: n for s, n in work.chunks.items() if s in self.last})
        if decodes.chunks:
            self.plain.append(self.true(decodes.shape))
        limit = self.limit(decodes.shape)
        self.scheduler.commit(work, {})
        self.scheduler.pace.observe(shape, seconds)
        self.now += seconds
        for sequence, _, _ in rows:
            if sequence in self.last:
                self.gaps.append(self.now - self.last[sequence])
                self.limits.append(limit)
            self.last[sequence] = self.now
            sequence.tokens.append(1)
            if sequence.num_output == sequence.group.request.sampling.max_tokens:
                self.scheduler.in_flight.finish(sequence)
                del self.last[sequence]
        return work

    def limit(self, decodes: Shape) -> float:
        """The default target: what a plain step of all would take that run, prompts included."""
        tokens, rows, read, pairs, _ = decodes
        num = sum(s not in self.last for s in self.scheduler.in_flight.running)
        joined = Shape(tokens + num, rows + num, read, pairs)
        return max(TARGET, PLAIN_STEPS * max(self.true(decodes), self.true(joined)))

    def load(self, steps: int) -> None:
        """Streams and prompts of all lengths come and go."""
        for _ in range(steps):
            if self.rng.random() < 0.1 and len(self.scheduler.in_flight.waiting) < 20:
                self.arrive(self.rng.choice([5, 50, 300, 4000]), self.rng.randrange(2, 120))
            self.step()


@pytest.mark.parametrize("prices", [SMALL, LARGE, WIDE])
@pytest.mark.parametrize("target", [0.0, 2.0])
def test_no_gap_is_over_the_target_ever(prices, target):
    """The costs are known: not one gap of thousands, whatever comes."""
    run = Simulation(Pace(target, prices, spread=0.0), cost(prices))
    run.load(1500)
    assert len(run.gaps) > 5000
    limits = [target or limit for limit in run.limits]
    assert all(gap <= limit * (1 + 1e-9) for gap, limit in zip(run.gaps, limits, strict=True))


def crowd(pace: Pace, true: Cost, first: int) -> Simulation:
    """Ten requests of 64 tokens that get 32 each, the first ones a step before the others; until all have ended."""
    run = Simulation(pace, true)
    all_of_them = [run.arrive(64, 32) for _ in range(first)]
    run.step()
    all_of_them += [run.arrive(64, 32) for _ in range(10 - first)]
    while any(sequence.num_output < 32 for sequence in all_of_them):
        run.step()
    return run


@pytest.mark.parametrize("first", [1, 4])
def test_a_crowd_is_not_kept_waiting_for_the_pace_of_its_first(first):
    """A lone stream's plain step is short; that of all ten is three times as long, and soon they all run."""
    prices = Prices(step=17e-3, token=3.6e-3, row=1.6e-3, read=1e-6, pair=4e-7)
    unpaced = crowd(Pace(1e6, prices, spread=0.05), cost(prices), first)
    paced = crowd(Pace(0.0, prices, spread=0.05), cost(prices), first)
    assert paced.now < 1.15 * unpaced.now
    assert max(paced.gaps) <= PLAIN_STEPS * max(paced.plain)
    assert max(unpaced.gaps) > 3 * max(paced.gaps)


def test_what_begins_no_stream_raises_no_target():
    """Prompts that get a token at most, beside a lone stream."""
    run = Simulation(Pace(prices=SMALL, spread=0.0), cost(SMALL))
    run.arrive(30, 1000)
    run.step()
    prompts = [run.arrive(300, 1) for _ in range(20)]
    while not all(sequence.num_output for sequence in prompts):
        run.step()
    assert max(run.gaps) <= TARGET


def worst_of_a_hundred(true: Cost, pace: Pace | None = None) -> float:
    """The gap that one in a hundred is over, as a share of the target, of 16 streams while a long prompt comes in."""
    run = Simulation(pace or Pace(), true)
    for _ in range(16):
        run.arrive(30, 4000)
    while len(run.last) < 16:
        run.step()
    for _ in range(100):
        run.step()
    huge = run.arrive(4000, 2)
    before = len(run.gaps)
    limit = max(TARGET, PLAIN_STEPS * statistics.median(run.gaps))
    while huge.num_output == 0:
        run.step()
    gaps = sorted(run.gaps[before:])
    return gaps[len(gaps) * 99 // 100] / limit


LEARNED = [cost(SMALL), cost(LARGE), cost(WIDE), bound_by_memory]


@pytest.mark.parametrize("true", LEARNED)
def test_gaps_while_the_costs_are_learned(true):
    assert worst_of_a_hundred(true) <= 1.1


def noisy(true: Cost, share: float, rows: int = 1) -> Cost:
    """Times that vary, of kernels that take rows by so many."""
    rng = random.Random(4)

    def up(count: int) -> int:
        return -(-count // rows) * rows

    def seconds(shape: Shape) -> float:
        padded = shape._replace(num_tokens=up(shape.num_tokens), num_rows=up(shape.num_rows))
        return true(padded) * math.exp(rng.gauss(0, share))

    return seconds


@pytest.mark.parametrize("true", LEARNED)
@pytest.mark.parametrize(("share", "rows"), [(0.05, 1), (0.15, 1), (0.03, 8)])
def test_gaps_on_a_machine_that_is_not_quiet(true, share, rows):
    assert worst_of_a_hundred(noisy(true, share, rows)) <= 1.25


def test_what_one_step_in_fifty_takes_is_planned_for_and_forgotten():
    pace, shape, true = Pace(0.2, SMALL, spread=0.0), Shape(40, 8, 1000, 9000), cost(SMALL)

    def room() -> float:
        return pace.spare(Shape(8, 8, 1000, 1000), 0) + pace.predict(Shape(8, 8, 1000, 1000))

    for number in range(1000):
        pace.observe(shape, true(shape) * (1.6 if number % 50 == 0 else 1))
    assert 0.2 / 1.6 < room() < 0.2 * 1.25 / 1.45
    for _ in range(200):
        pace.observe(shape, true(shape))
    assert room() == pytest.approx(0.2, rel=0.02)


def test_where_all_have_drafts_a_plain_step_is_priced_like_all():
    """Nothing but steps with drafts, of a model ten times as dear as was thought: plain ones are, too."""
    pace, true = Pace(), cost(LARGE)
    drafted, plain = Shape(48, 48, 4000, 12_000), Shape(16, 16, 4000, 4000)
    for _ in range(100):
        pace.observe(drafted, true(drafted))
    assert pace.spare(plain, 0) + pace.predict(plain) == pytest.approx(PLAIN_STEPS * true(plain), rel=0.3)


def test_a_prompt_gets_on_whatever_the_target():
    run = Simulation(Pace(1e-3, LARGE, spread=0.0), cost(LARGE))
    for _ in range(16):
        run.arrive(30, 3000)
    while len(run.last) < 16:
        run.step()
    huge = run.arrive(4000, 2)
    started = run.now
    alone = Pace(prices=LARGE).chunk_seconds(0, 4000)
    while huge.num_output == 0:
        run.step()
    assert run.now - started < 8 * alone
    assert max(run.gaps) <= 1.3 * max(run.plain)


def test_the_whole_budget_where_nothing_decodes():
    run = Simulation(Pace(1e-3, LARGE, spread=0.0), cost(LARGE))
    huge = run.arrive(4000, 2)
    assert run.step().chunks == {huge: 512}
