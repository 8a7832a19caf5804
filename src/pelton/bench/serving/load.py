"""What is asked of a server: how many requests, how long, when, and what they share. All drawn from one seed."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from pelton.bench.serving.wire import Prompt
from pelton.bench.serving.words import Counting, text
from pelton.errors import InvalidRequest


@dataclass(frozen=True)
class Lengths:
    """Tokens: one length where `low` is `high`, or log-uniform between them: as many requests from 32 to 64 as from
    256 to 512, so that short ones are common and long ones take most of the tokens."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """From "128" or "32-512"."""
        low, dash, high = text.partition("-")
        try:
            lengths = cls(int(low), int(high if dash else low))
        except ValueError:
            raise InvalidRequest(f"{text!r} is neither a number of tokens nor two (32-512)") from None
        if not 1 <= lengths.low <= lengths.high:
            raise InvalidRequest(f"the lengths {text} do not go from 1 or more to no less than that")
        return lengths

    def draw(self, source: random.Random) -> int:
        """One length."""
        share = source.random()
        if self.low == self.high:
            return self.low
        drawn = math.exp(math.log(self.low) + share * (math.log(self.high + 1) - math.log(self.low)))
        return min(self.high, int(drawn))

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


@dataclass(frozen=True)
class Systems:
    """Each prompt begins with one of `num_prompts` system prompts of `num_tokens`, or, to compare with, with one of
    its own that is as long."""

    num_prompts: int
    num_tokens: int
    is_shared: bool = True

    @classmethod
    def parse(cls, text: str) -> Systems:
        """From "4x512": four of 512 tokens."""
        count, _, length = text.partition("x")
        if not (count.isdecimal() and length.isdecimal() and int(count) and int(length)):
            raise InvalidRequest(f"{text!r} is not a number of system prompts and their length (4x512)")
        return cls(int(count), int(length))


@dataclass(frozen=True)
class Ask:
    """One request, before any server's way to count."""

    seed: str
    num_prompt_tokens: int
    num_output_tokens: int
    system_seed: str | None = None
    num_system_tokens: int = 0
    arrival: float = 0.0
    """Seconds after the load's beginning; nothing to a closed loop."""

    def prompt(self, counting: Counting) -> Prompt:
        """Its words."""
        user = text(self.seed, counting.num_words(self.num_prompt_tokens))
        if self.system_seed is None:
            return Prompt(user)
        return Prompt(user, text(self.system_seed, counting.num_words_inside(self.num_system_tokens)))


@dataclass(frozen=True)
class Load:
    """Closed loop: `concurrency` users, each sending the next request when it has its answer. Open loop: `rate`
    requests per second on average, at the times of a Poisson process, however many run already. One of both is None."""

    concurrency: int | None
    rate: float | None
    num_requests: int
    prompt: Lengths
    output: Lengths
    systems: Systems | None = None
    num_warm_up: int = 2
    seed: int = 0

    @property
    def level(self) -> str:
        """A name for how much load this is."""
        return str(self.concurrency) if self.rate is None else f"{self.rate:g}/s"

    def asks(self) -> list[Ask]:
        """What is measured."""
        return self._asks("", self.num_requests)

    def warm_up(self) -> list[Ask]:
        """What is sent before, and not counted: the same kind of requests, and each shared system prompt once, since
        a server at work knows those."""
        asks = self._asks("warm-up ", self.num_warm_up)
        if self.systems is None or not self.systems.is_shared:
            return asks
        shared = range(self.systems.num_prompts)
        first = self._asks("systems ", self.systems.num_prompts)
        return asks + [
            replace(ask, system_seed=self._shared(i), num_output_tokens=1) for i, ask in zip(shared, first, strict=True)
        ]

    def _asks(self, kind: str, count: int) -> list[Ask]:
        source = random.Random(f"{self.seed} {kind}lengths")
        arrivals = self._arrivals(random.Random(f"{self.seed} {kind}arrivals"))
        asks = []
        for i in range(count):
            ask = Ask(f"{self.seed} {kind}user {i}", self.prompt.draw(source), self.output.draw(source))
            ask = replace(ask, arrival=next(arrivals))
            if self.systems is not None:
                own = f"{self.seed} {kind}system {i}"
                seed = self._shared(source.randrange(self.systems.num_prompts)) if self.systems.is_shared else own
                ask = replace(ask, system_seed=seed, num_system_tokens=self.systems.num_tokens)
            asks.append(ask)
        return asks

    def _shared(self, i: int) -> str:
        return f"{self.seed} shared system {i}"

    def _arrivals(self, source: random.Random) -> Iterator[float]:
        now = 0.0
        while True:
            yield now
            now += source.expovariate(self.rate) if self.rate is not None else 0.0
