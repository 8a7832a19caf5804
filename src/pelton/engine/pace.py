"""How long a step takes, learned from the steps that ran, and how much prefill fits beside streams that decode.

The time of a step is a sum of prices: one for the step (weights are read once), one per token that is computed, per
token that is drawn, per token of context that is walked once per sequence (memory) and once per token (arithmetic),
and per byte of KV memory that is moved.
Each measured step moves the logarithms of the prices, in proportion to the share that each has in the prediction, a
part of the way to where the prediction would have been right. So prices stay positive, a price that a kind of step
does not touch is not moved by it, and a slow phase of the machine is followed in a few steps. An outlier counts as
`CLIP` at the most. All of it is a function of the observations alone.

What is left is planned for, too: a step is to end well before its target, by how far off predictions are (`MARGIN`) and
by what one step in a hundred is over its own (`TAIL`), which tells of a machine that does other work besides.

A step that draws after every token that it computes, as decoding does, is no sum where there are few rows: the first
ones cost little beside the weights that are read for them, and kernels take rows in groups. For such steps a factor
for each range of row counts is learned besides, which takes up what the prices leave. How fast drafts are depends on
little else.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import NamedTuple

TARGET = 0.05
"""Seconds between two tokens of a stream that are always allowed, unless a target is set."""
PLAIN_STEPS = 2.0
"""Without a target, a step may take this many times as long as one that only decodes, for all that run: those whose
prompts are still computed count, too. A lone stream would else keep a crowd waiting for a pace that ends with them."""
LEAST = 1.25
"""Whatever the target, a step may take this many times as long as one that only decodes: prompts get on."""
NUM_WARMUP = 8
"""Observations that count in full: the first prices are guesses."""
RATE = 0.3
"""Part of an error that one observation corrects after that."""
CLIP = math.log(1.5)
SPREAD_RATE = 1 / 16
MARGIN = 2.0
"""A step is planned to end this many spreads before its target."""
TAIL = 0.01
"""The part of the steps that may be over the target by more than `LEAST_TAIL`."""
TAIL_RATE = 0.2
"""What one of them moves the limit by."""
LEAST_TAIL = math.log(1.15)
FORGET = 32
"""After so many steps with drafts, and none without, what plain ones took is of no use."""
RANGES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""The last row count of each range that has a factor of its own; the last one has the rest."""
MOST_UNREAD = 64
"""Observations that are put by until somebody asks for a prediction."""
FACTOR_RATE = 0.1
"""Part of an error that the factor of a step's range takes up, once it has been seen a few times."""
UNSEEN = 0.1
"""Doubt per range between a step's and the nearest one that has been seen, as a share."""


class Shape(NamedTuple):
    """What a step does, as far as its time depends on it."""

    num_tokens: int = 0
    """Tokens that are computed."""
    num_rows: int = 0
    """Tokens that are drawn."""
    num_read: int = 0
    """Tokens of context, summed over the sequences."""
    num_pairs: int = 0
    """Tokens of context, summed over the tokens that are computed."""
    num_bytes: int = 0
    """Bytes of KV memory that are moved before it."""


def num_pairs(start: int, num_tokens: int) -> int:
    """Pairs of tokens and what they see, of a chunk that begins at `start`."""
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2


def _range(shape: Shape) -> int:
    return min(bisect_left(RANGES, shape.num_rows), len(RANGES) - 1)


class Prices(NamedTuple):
    """Seconds per step and per unit of its `Shape`. The defaults have the proportions of a small model on a CPU; the
    first observation sets their scale, but for bytes."""

    step: float = 4e-3
    token: float = 1e-3
    row: float = 2e-4
    read: float = 1e-7
    pair: float = 1e-7
    byte: float = 1e-9


Terms = tuple[float, float, float, float, float, float]


def _terms(prices: Prices, shape: Shape) -> Terms:
    """What each price has in the time of a step, in seconds."""
    step, token, row, read, pair, byte = prices
    num_tokens, num_rows, num_read, num_pairs, num_bytes = shape
    return (step, token * num_tokens, row * num_rows, read * num_read, pair * num_pairs, byte * num_bytes)


class Costs:
    """Prices that are learned, and how far off their predictions are."""

    def __init__(self, prices: Prices | None, spread: float) -> None:
        self.prices = prices or Prices()
        self.spread = spread
        """How far off they have been lately, as a share."""
        self._num_observed = 0 if prices is None else NUM_WARMUP
        self._factors = [0.0] * len(RANGES)
        """Logarithms."""
        self._num_seen = [0] * len(RANGES)

    def predict(self, shape: Shape) -> float:
        """Seconds that a step takes."""
        seconds = self.priced(shape)
        if shape.num_tokens == shape.num_rows:
            seconds *= math.exp(self._factors[self._nearest(_range(shape))])
        return seconds

    def priced(self, shape: Shape) -> float:
        """Its prices alone, in seconds."""
        return sum(_terms(self.prices, shape))

    def _nearest(self, place: int) -> int:
        """The nearest range that has been seen; the same where none has."""
        if self._num_seen[place]:
            return place
        seen = [other for other, count in enumerate(self._num_seen) if count]
        return min(seen, key=lambda other: abs(other - place), default=place)

    def doubt(self, shape: Shape) -> float:
        """How many times as long as predicted a step that draws after each of its tokens may take for all that is
        known: the more, the farther its row count is from those that have been seen."""
        place = _range(shape)
        return float((1 + UNSEEN) ** abs(place - self._nearest(place)))

    def observe(self, shape: Shape, seconds: float) -> float:
        """A step of that shape took so long. The logarithm of how many times as long as predicted; 0 while nothing is
        known."""
        terms = _terms(self.prices, shape)
        total = sum(terms)
        error, rate = math.log(seconds / total), 1.0
        place = _range(shape) if shape.num_tokens == shape.num_rows else None
        if place is not None:
            error -= self._factors[self._nearest(place)]
        self._num_observed += 1
        if self._num_observed == 1:
            scale = math.exp(error)
            self.prices = Prices(*[price * scale for price in self.prices])._replace(byte=self.prices.byte)
            return 0.0
        clipped = min(max(error, -CLIP), CLIP)
        self.spread += SPREAD_RATE * (abs(clipped) - self.spread)
        if self._num_observed <= NUM_WARMUP:
            self._move(terms, error * total)
            return 0.0
        rate = RATE if place is None else RATE * (1 - self._bend(place, clipped))
        self._move(terms, rate * clipped * total)
        return error

    def _bend(self, place: int, error: float) -> float:
        """Move the factor of a step's range, and return which part of the error that takes up."""
        part = max(FACTOR_RATE, 1 / (2 + self._num_seen[place]))
        self._factors[place] = self._factors[self._nearest(place)] + part * error
        self._num_seen[place] += 1
        return part

    def _move(self, terms: Terms, way: float) -> None:
        """Move the logarithms of the prices, each in proportion to its term, such that the terms together, times what
        they move by, come to `way`."""
        step, token, row, read, pair, byte = self.prices  # spelt out: a loop takes five times as long
        t0, t1, t2, t3, t4, t5 = terms
        scale = way / (t0 * t0 + t1 * t1 + t2 * t2 + t3 * t3 + t4 * t4 + t5 * t5)
        exp = math.exp
        self.prices = Prices(
            step * exp(scale * t0),
            token * exp(scale * t1),
            row * exp(scale * t2),
            read * exp(scale * t3),
            pair * exp(scale * t4),
            byte * exp(scale * t5),
        )


class Pace:
    """What the steps of one engine cost. `target`: seconds that a step beside streams may take, 0: by itself.
    `prices` and `spread`: what is thought before anything was observed.

    Steps that only decode have prices of their own, learned from them alone. From mixed steps it cannot be told which
    part has changed; if the target, which may be a multiple of a plain step, came from those prices, a prompt that
    turns out dear would raise the target for itself. Only where streams have done nothing but try drafts are plain
    steps priced like all.
    """

    def __init__(self, target: float = 0.0, prices: Prices | None = None, spread: float = 0.25) -> None:
        self.target = target
        self._costs = Costs(prices, spread)
        self._plain_costs = Costs(prices, spread)
        self._tail = LEAST_TAIL
        """The logarithm of how many times as long as predicted a step takes, but for one in a hundred."""
        self._num_drafting = FORGET if prices is None else 0
        """Steps with drafts since the last plain one."""
        self._unread: list[tuple[Shape, float]] = []
        """Observations that nobody has asked about yet: to learn from some at once takes less time."""
        self.mean_output = 100.0
        """Tokens of an answer, over those that ended lately."""

    def ended(self, num_output: int) -> None:
        """An answer has ended."""
        if num_output:
            self.mean_output += (num_output - self.mean_output) / 16

    @property
    def _all(self) -> Costs:
        """Of steps of all kinds."""
        self._learn()
        return self._costs

    @property
    def _plain(self) -> Costs:
        """Of steps that only decode."""
        self._learn()
        return self._plain_costs

    @property
    def prices(self) -> Prices:
        """Of steps of all kinds."""
        return self._all.prices

    @property
    def spread(self) -> float:
        """How far off predictions have been lately, as a share."""
        return self._all.spread

    def predict(self, shape: Shape) -> float:
        """Seconds that a step takes."""
        return self._all.predict(shape)

    def doubt(self, shape: Shape) -> float:
        """How many times as long as predicted a step may take for all that is known, at least 1."""
        return self._all.doubt(shape)

    def observe(self, shape: Shape, seconds: float) -> None:
        """A step of that shape took so long."""
        if seconds <= 0 or not shape.num_tokens:
            return
        self._unread.append((shape, seconds))
        if len(self._unread) == MOST_UNREAD:
            self._learn()

    def _learn(self) -> None:
        for shape, seconds in self._unread:
            error = self._costs.observe(shape, seconds)
            if shape.num_tokens == shape.num_rows:
                if shape.num_read == shape.num_pairs:
                    error = self._plain_costs.observe(shape, seconds)
                    self._num_drafting = 0
                else:
                    self._num_drafting += 1
            self._tail = max(LEAST_TAIL, self._tail + TAIL_RATE * ((error > self._tail) - TAIL))
        self._unread.clear()

    def spare(self, shape: Shape, num_bytes: int, num_joining: int = 0) -> float:
        """Seconds that prefill and moves of so many bytes may add to a step that else only decodes, such that it keeps
        to the target although predictions are off now and then. `num_joining`: streams that the prefill will begin."""
        self._learn()
        costs = self._plain if self._num_drafting < FORGET else self._all
        plain = costs.predict(shape)
        target = self.target or max(TARGET, PLAIN_STEPS * self._plain_with(costs, shape, num_joining))
        limit = target / max(1 + MARGIN * self.spread, math.exp(self._tail - LEAST_TAIL))
        return max(limit - self.predict(shape._replace(num_bytes=num_bytes)), (LEAST - 1) * plain)

    def _plain_with(self, costs: Costs, shape: Shape, num_joining: int) -> float:
        """What a plain step takes with so many more streams. Plain steps may never have had as many rows, and mixed
        ones may mislead: the lower of what their costs say, so that neither makes the target too long."""
        tokens, rows, read, pairs, _ = shape
        joined = Shape(tokens + num_joining, rows + num_joining, read, pairs)
        return max(costs.predict(shape), min(costs.predict(joined), self.predict(joined)))

    def chunk_seconds(self, start: int, num_tokens: int, is_scored: bool = True) -> float:
        """What a chunk that begins at `start`, and ends its prompt, adds to a step. Each token of one that is not
        `is_scored` has a row."""
        num_rows = 1 if is_scored else num_tokens
        shape = Shape(num_tokens, num_rows, start + num_tokens, num_pairs(start, num_tokens))
        return self._all.priced(shape) - self.prices.step

    def chunk_within(self, seconds: float, start: int, is_scored: bool = True) -> int:
        """The most tokens of a chunk that adds no more than so many seconds to a step."""
        if seconds == math.inf:
            return 1 << 30
        prices = self.prices
        left = seconds - prices.row - prices.read * start
        if left <= 0:
            return 0
        slope = prices.token + prices.row * (not is_scored) + prices.read + prices.pair * (start + 0.5)
        return int(2 * left / (slope + math.sqrt(slope * slope + 2 * prices.pair * left)))
