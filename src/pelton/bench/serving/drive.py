"""Puts one load on one server: users who wait for their answers, or arrivals that do not wait for anything."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from pelton.bench.serving.http import send
from pelton.bench.serving.load import Ask, Load
from pelton.bench.serving.result import Objective, Result, Sample, summarise
from pelton.bench.serving.target import Target
from pelton.bench.serving.wire import PATHS, Reader, body
from pelton.bench.serving.words import Counting
from pelton.engine.machine import num_cores


async def drive(
    target: Target,
    load: Load,
    *,
    counting: Counting | None = None,
    objective: Objective | None = None,
    timeout: float = 600,
) -> Result:
    """Warm up, then measure. `counting` sizes the prompts (default: as this server counts), so that servers which
    are compared can get the same; `timeout`: seconds that a request may take."""
    client = _Client(target, timeout)
    counting = counting or target.counting
    await asyncio.gather(*(client.ask(*client.prepared(ask, counting)) for ask in load.warm_up()))
    work = [(*client.prepared(ask, counting), ask.arrival) for ask in load.asks()]
    client.max_in_flight = 0
    begun, used = time.perf_counter(), time.process_time()
    samples = await (_closed(client, work, load.concurrency) if load.concurrency else _open(client, work, begun))
    seconds, used = time.perf_counter() - begun, time.process_time() - used
    return summarise(samples, seconds, client.max_in_flight, used / seconds / num_cores(), objective)


Work = Sequence[tuple[bytes, int, float]]
"""Each request's body, its tokens of output and its arrival."""


async def _closed(client: _Client, work: Work, concurrency: int) -> list[Sample]:
    waiting, samples = iter(work), list[Sample]()

    async def user() -> None:
        for data, num_tokens, _ in waiting:
            samples.append(await client.ask(data, num_tokens))

    await asyncio.gather(*(user() for _ in range(concurrency)))
    return samples


async def _open(client: _Client, work: Work, begun: float) -> list[Sample]:
    """Times count from the arrival as it was drawn, even if this client was late."""

    async def arrive(data: bytes, num_tokens: int, arrival: float) -> Sample:
        await asyncio.sleep(max(0.0, begun + arrival - time.perf_counter()))
        return await client.ask(data, num_tokens, begun + arrival)

    return await asyncio.gather(*(arrive(*one) for one in work))


@dataclass
class _Client:
    target: Target
    timeout: float
    in_flight: int = 0
    max_in_flight: int = field(default=0)

    def prepared(self, ask: Ask, counting: Counting) -> tuple[bytes, int]:
        target, length = self.target, ask.num_output_tokens
        prompt = ask.prompt(counting)
        needs_minimum = not target.has_usage
        return body(target.model, target.endpoint, prompt, length, is_stream=True, needs_minimum=needs_minimum), length

    async def ask(self, data: bytes, num_tokens: int, begun: float | None = None) -> Sample:
        """Send one request, wait for its answer, never raise for what a server does."""
        begun = time.perf_counter() if begun is None else begun
        reader = Reader()
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        try:
            async with asyncio.timeout(self.timeout):
                await send(self.target.address, "POST", PATHS[self.target.endpoint], data, reader.receive)
        except TimeoutError:
            reader.error = f"no answer in {self.timeout:g} s"
        except OSError as error:
            reader.error = reader.error or str(error) or type(error).__name__
        finally:
            self.in_flight -= 1
        return self._sample(reader, num_tokens, begun, time.perf_counter())

    def _sample(self, reader: Reader, num_tokens: int, begun: float, end: float) -> Sample:
        """Tokens are those of the usage. A server whose streams never say any counts as many as were asked for where
        it says itself that this length ended the answer."""
        usage = reader.usage
        if usage is not None:
            num_tokens = usage.completion_tokens
        elif self.target.has_usage or reader.finish_reason != "length":
            num_tokens = 0
        if reader.error or not num_tokens or reader.first is None:
            return Sample(end - begun, error=reader.error or "the answer says no usage, or has no tokens")
        details = None if usage is None else usage.prompt_tokens_details
        return Sample(
            end=end - begun,
            ttft=reader.first - begun,
            last=reader.last - begun,
            gaps=reader.gaps,
            num_prompt_tokens=None if usage is None else usage.prompt_tokens,
            num_cached_tokens=None if details is None else details.cached_tokens,
            num_output_tokens=num_tokens,
        )
