"""When and how far to draft: the scheduler in a simulated clock, against costs and texts that it is not told."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest

from pelton.engine.batch import Row
from pelton.engine.drafter import LookupDrafter, MatchAcceptance
from pelton.engine.kv_memory import KVMemory
from pelton.engine.lookup import LONGEST
from pelton.engine.pace import Pace, Prices, Shape
from pelton.engine.scheduler import Scheduler
from pelton.engine.sequence import Sequence, SequenceGroup
from pelton.engine.speculative import Speculation, count_accepted
from tests.unit.toy_executor import request
from tests.unit.toy_grammar import Template

NUM_OUTPUT = 160
NOISE = 0.1


def linear(step: float, token: float) -> Callable[[Shape], float]:
    return Pace(prices=Prices(step, token * 0.8, token * 0.2, 1e-7, 1e-7)).predict


COSTS: dict[str, Callable[[Shape], float]] = {
    "small": linear(7e-3, 1.7e-3),
    "large": linear(0.19, 0.049),
    "rows cost all": linear(1e-3, 0.02),
    "rows are free": lambda shape: 0.03,
    "bound by memory": lambda shape: max(0.02, 1.5e-3 * shape.num_tokens),
    "in groups of four": lambda shape: 5e-3 + 8e-3 * math.ceil(shape.num_tokens / 4),
    "a cliff behind one": lambda shape: 0.01 + 2e-3 * shape.num_tokens + 0.02 * (shape.num_tokens > 1),
}
SHARES = [0.0, 0.5, 0.8, 0.95, 1.0]


def text(share: float, seed: int) -> tuple[list[int], list[int]]:
    """A prompt and its answer, which goes on copying the prompt with this probability at each token, and has another
    token in its place else."""
    rng = random.Random(seed)
    prompt = [rng.randrange(300) for _ in range(NUM_OUTPUT)]
    return prompt, [token if rng.random() < share else rng.randrange(300) for token in prompt]


def filled(share: float, seed: int, num_forced: int) -> tuple[list[int], list[int], Template]:
    """A prompt, and a form that is filled in with its tokens: after each four, `num_forced` tokens of the form's."""
    prompt, free = text(share, seed)
    answer: list[int] = []
    places: list[frozenset[int]] = []
    while len(answer) < NUM_OUTPUT:
        form = [300 + (len(answer) + i) % 97 for i in range(num_forced)]
        answer += [*form, *free[len(answer) :][:4]]
        places += [*(frozenset({token}) for token in form), *[frozenset(range(300))] * 4]
    return prompt, answer[:NUM_OUTPUT], Template(places[:NUM_OUTPUT])


class Fixed(Speculation):
    """Drafts so many tokens wherever there is a match."""

    num_tokens = 0

    def draft(self, shape: Shape, sequences: Mapping[Sequence, int], spare: int) -> None:
        for _, place, sequence in self._offers(self._looked(sequences), spare):
            if place == 0 and self.num_tokens:
                assert sequence.drafter is not None
                sequence.draft = sequence.drafter.lookup.draft(sequence.tokens, self.num_tokens)[
                    : sequence.max_length - len(sequence.tokens) - 1
                ]


class Simulation:
    """An engine's life: one load after the other. The scheduler sees noisy times."""

    def __init__(self, cost: str, num_fixed: int | None) -> None:
        self.rng = random.Random(5)
        self.cost = COSTS[cost]
        pace = Pace(target=1e6)
        speculation = Speculation(pace) if num_fixed is None else Fixed(pace)
        if isinstance(speculation, Fixed):
            speculation.num_tokens = num_fixed or 0
        memory = KVMemory((None,), (2000,), max_chunk=512, is_caching=False)
        limits = {"max_tokens": 512, "max_sequences": 64, "max_queue": 100}
        self.scheduler = Scheduler(memory, pace, speculation=speculation, **limits)

    def load(self, share: float, streams: int, num_forced: int = 0) -> float:
        """Seconds that all answers take, the prompts' apart. With `num_forced`, they are forms that are filled in."""
        scheduler, seconds = self.scheduler, 0.0
        answers: dict[Sequence, list[int]] = {}
        for seed in range(streams):
            prompt, answer, grammar = filled(share, seed, num_forced)
            sequence = SequenceGroup(request(str(seed), prompt, max_tokens=NUM_OUTPUT), seed).sequences[0]
            answers[sequence] = answer
            sequence.constraint = grammar if num_forced else None
            scheduler.in_flight.add(sequence)
        while scheduler.in_flight.has_work:
            work = scheduler.schedule()
            shape = work.shape
            accepted = {s: count(s, answers[s]) for s in work.chunks if s.draft}
            drawing = [s for s, num_tokens in work.chunks.items() if num_tokens >= s.num_new]
            scheduler.commit(work, accepted)
            seconds += self.cost(shape) * (shape.num_tokens == shape.num_rows)
            scheduler.pace.observe(shape, self.cost(shape) * math.exp(self.rng.gauss(0, NOISE)))
            for sequence in drawing:
                sequence.tokens.append(answers[sequence][sequence.num_output])
                if isinstance(sequence.constraint, Template):
                    sequence.constraint.at = sequence.num_output
                if sequence.num_output == NUM_OUTPUT:
                    assert sequence.tokens[sequence.num_prompt :].tolist() == answers[sequence]
                    scheduler.in_flight.finish(sequence)
        return seconds


def count(sequence: Sequence, answer: list[int]) -> int:
    truth = answer[sequence.num_output :]
    return next((i for i, token in enumerate(sequence.draft) if token != truth[i]), len(sequence.draft))


@cache
def seconds(cost: str, share: float, streams: int, num_fixed: int) -> float:
    return Simulation(cost, num_fixed).load(share, streams)


@pytest.mark.parametrize("streams", [1, 6])
@pytest.mark.parametrize("num_forced", [1, 4])
@pytest.mark.parametrize("share", [0.0, 0.8])
@pytest.mark.parametrize("cost", COSTS)
def test_never_slower_than_plain_under_a_grammar(cost, share, num_forced, streams):
    """What rows cost has to be found out: a few steps are lost at first where tokens are sure and rows are dear."""
    plain, engine = seconds(cost, share, streams, 0), Simulation(cost, None)
    first, second = (engine.load(share, streams, num_forced) for _ in range(2))
    assert first + second <= 2 * plain / 0.95
    assert second <= plain / 0.98


def test_forced_tokens_pay_where_nothing_else_can_be_guessed():
    engine = Simulation("small", None)
    assert engine.load(0.0, 1, num_forced=4) < seconds("small", 0.0, 1, 0) / 1.25
    assert engine.scheduler.drafts.num_accepted > 0.97 * engine.scheduler.drafts.num_drafted
    assert Simulation("rows cost all", None).load(0.0, 1, num_forced=4) <= seconds("rows cost all", 0.0, 1, 0) / 0.98


@pytest.mark.parametrize("streams", [1, 6])
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("cost", COSTS)
def test_never_slower_than_plain_though_nothing_is_known_at_first(cost, share, streams):
    plain, engine = seconds(cost, share, streams, 0), Simulation(cost, None)
    for _ in range(2):
        assert engine.load(share, streams) <= plain / 0.95


@pytest.mark.parametrize("streams", [1, 6])
@pytest.mark.parametrize("share", [0.8, 0.95, 1.0])
@pytest.mark.parametrize("cost", ["small", "bound by memory", "in groups of four", "a cliff behind one"])
def test_as_fast_as_the_best_fixed_length_once_it_knows_the_costs(cost, share, streams):
    best = min(seconds(cost, share, streams, num_fixed) for num_fixed in (0, 2, 4, 8, 16, 32))
    engine = Simulation(cost, None)
    times = [engine.load(share, streams) for _ in range(8)]
    assert statistics.median(times[4:]) <= best / 0.85


def test_a_copy_is_fast_and_a_random_text_costs_nothing():
    assert Simulation("small", None).load(1.0, 1) < seconds("small", 1.0, 1, 0) / 2.5
    engine = Simulation("small", None)
    assert engine.load(0.0, 1) < 1.01 * seconds("small", 0.0, 1, 0)
    assert engine.scheduler.drafts.num_drafted <= 8


def test_a_load_that_ceases_to_copy_is_noticed():
    engine = Simulation("large", None)
    engine.load(1.0, 2)
    assert engine.load(0.3, 2) < 1.05 * seconds("large", 0.3, 2, 0)


def test_a_batch_whose_rows_cost_all_the_time_gets_no_drafts():
    engine = Simulation("rows cost all", None)
    engine.load(0.8, 6)
    assert engine.scheduler.drafts.num_drafted < 0.1 * 6 * NUM_OUTPUT


def test_a_step_beside_other_streams_keeps_to_the_target():
    pace = Pace(0.02, Prices(7e-3, 1.7e-3, 0.0, 0.0, 0.0), spread=0.0)
    speculation = Speculation(pace)
    sequences = {}
    for name in "ab":
        sequence = SequenceGroup(request(name, [1, 2, 3, 4, 5] * 20, max_tokens=500), 0).sequences[0]
        sequence.tokens.append(1)
        sequences[sequence] = 1
        drafter = sequence.drafter = LookupDrafter(MatchAcceptance())
        for length in [2, 4, 8, 16, 32] * 100:
            drafter.acceptance.learn(length, True)
    shape = Shape(2, 2, 200, 200)
    speculation.draft(shape, sequences, 500)
    num_drafted = sum(len(sequence.draft) for sequence in sequences)
    assert num_drafted > 2
    assert pace.predict(Shape(2 + num_drafted, 2 + num_drafted, 0, 0)) <= 0.02
    assert pace.predict(Shape(3 + num_drafted, 3 + num_drafted, 0, 0)) > 0.02


def test_a_draft_stops_before_what_ends_the_answer_and_short_of_its_length():
    pace = Pace(prices=Prices(1.0, 1e-6, 0.0, 0.0, 0.0))
    for asked, expected in [
        (request("a", [1, 2, 3, 4, 5, 6, 1], max_tokens=100, end_ids=(5,)), [3, 4]),
        (request("a", [1, 2, 3, 4, 5, 6, 1], max_tokens=100, end_ids=(3,)), []),
        (request("a", [1, 2, 3, 4, 5, 6, 1], max_tokens=100, end_ids=(5,), ignore_eos=True), [3, 4, 5]),
        (request("a", [1, 2, 3, 4, 5, 6, 1], max_tokens=4), [3, 4]),
        (request("a", [1, 2, 3, 4, 5, 6, 1], max_tokens=2), []),
    ]:
        sequence = SequenceGroup(asked, 0).sequences[0]
        sequence.tokens.append(2)
        Speculation(pace).draft(Shape(1, 1, 8, 8), {sequence: 1}, 100)
        assert sequence.draft.tolist() == expected


def test_more_streams_than_are_looked_at_have_their_turns():
    pace = Pace(prices=Prices(1.0, 1e-6, 0.0, 0.0, 0.0))
    speculation = Speculation(pace)
    sequences = {}
    for arrival in range(40):
        sequence = SequenceGroup(request(str(arrival), [1, 2, 3, 1], max_tokens=100), arrival).sequences[0]
        sequence.tokens.append(2)
        sequences[sequence] = 1
    for _ in range(3):
        speculation.draft(Shape(40, 40, 200, 200), sequences, 400)
    assert all(sequence.draft for sequence in sequences)


def test_acceptance_follows_what_is_seen_and_a_new_sequence_what_others_saw():
    everyone = MatchAcceptance(window=1000)
    one = MatchAcceptance(everyone)
    for _ in range(100):
        one.learn(5, True)
        one.learn(2, False)
    assert one.gains(5, 2)[0] > 0.95
    assert one.gains(2, 4) == []
    fresh = MatchAcceptance(everyone)
    assert 0.7 < fresh.gains(5, 1)[0] < one.gains(5, 1)[0]
    for _ in range(60):
        one.learn(5, False)
    assert one.gains(5, 1)[0] < 0.2
    gains = fresh.gains(LONGEST, 40)
    assert gains == sorted(gains, reverse=True)
    assert len(set(gains)) == len(gains)


@pytest.mark.parametrize(("drawn", "num_accepted"), [([7, 8, 9], 2), ([7, 1, 9], 1), ([1, 8, 9], 0), ([1, 1, 1], 0)])
def test_accepted_drafts_are_counted_in_plain_integers(drawn, num_accepted):
    """The counts cross to another process, where the numbers of arrays cannot go."""
    (sequence,) = SequenceGroup(request("a", [1, 2, 3]), 0).sequences
    sequence.draft = [7, 8]
    sampled = SimpleNamespace(ids=np.array(drawn, np.int32), errors=np.zeros(3, np.int32))
    accepted = count_accepted([Row(sequence, offset) for offset in range(3)], sampled)  # type: ignore[arg-type]
    assert accepted == {sequence: num_accepted}
    assert type(accepted[sequence]) is int
