"""Load over HTTP on any OpenAI-compatible server: throughput, and the times a user feels.

Every request sends its own random token ids to /v1/completions (so lengths are exact and no cache can help) and asks
for a fixed number of tokens. Tokens are counted by the server's usage, never by chunks.

What decoding is limited by is memory: a step reads all weights once, and gives each stream that runs one token. So a
load of C streams at once that gave T tokens per second has read its W bytes of weights at T / C * W bytes per second at
least; beside it stands the share of what this machine can read. Prompts and the last requests, when fewer streams are
left, take time in which this formula counts little or nothing.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from urllib.parse import urlsplit

import httpx2
import msgspec

from pelton.errors import InvalidRequest


@dataclass(frozen=True)
class Target:
    """A server's first model. `weight_bytes`: None where the server does not tell."""

    url: str
    model: str
    weight_bytes: int | None

    @property
    def is_here(self) -> bool:
        """Does it run on this machine, as far as its address tells?"""
        host = urlsplit(self.url).hostname or ""
        try:
            return host == "localhost" or ip_address(host).is_loopback
        except ValueError:
            return False


@dataclass(frozen=True)
class Load:
    """What is asked of a server."""

    concurrency: int
    num_requests: int
    prompt_tokens: int
    output_tokens: int
    seed: int = 0


@dataclass
class Sample:
    """One request's times, in seconds from its start."""

    ttft: float = 0.0
    end: float = 0.0
    gaps: list[float] = field(default_factory=list)
    num_tokens: int = 0
    error: str = ""


@dataclass(frozen=True)
class Result:
    """A load's figures. Times are in seconds; `quantiles` are (median, p95, p99)."""

    load: Load
    num_failed: int
    first_error: str
    seconds: float
    tokens_per_second: float
    ttft: tuple[float, float, float]
    itl: tuple[float, float, float]
    end_to_end: tuple[float, float, float]

    def weights_read(self, weight_bytes: int) -> float:
        """Bytes of weights per second that these tokens took to read: the formula above."""
        return self.tokens_per_second / self.load.concurrency * weight_bytes


class _Card(msgspec.Struct):
    id: str
    weight_bytes: int | None = None


class _Models(msgspec.Struct):
    data: list[_Card]


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Choice(msgspec.Struct):
    text: str | None = None


class _Error(msgspec.Struct):
    message: str = ""


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


_decode = msgspec.json.Decoder(_Chunk).decode


async def first_model(url: str) -> Target:
    """The first model that a server lists. Raises `InvalidRequest` where none answers."""
    try:
        async with httpx2.AsyncClient(timeout=10) as client:
            answer = (await client.get(f"{url}/v1/models")).raise_for_status()
        card = msgspec.json.decode(answer.content, type=_Models).data[0]
        return Target(url, card.id, card.weight_bytes)
    except (httpx2.HTTPError, httpx2.InvalidURL, IndexError, msgspec.MsgspecError) as error:
        raise InvalidRequest(f"{url} does not answer as an OpenAI-compatible server: {error}") from None


async def drive(target: Target, load: Load) -> Result:
    """Put one load on a server and measure it."""
    source = random.Random(load.seed)
    prompts = [[source.randrange(1000, 20000) for _ in range(load.prompt_tokens)] for _ in range(load.num_requests)]
    waiting = iter(prompts)
    samples: list[Sample] = []
    limits = httpx2.Limits(max_connections=load.concurrency, max_keepalive_connections=load.concurrency)
    async with httpx2.AsyncClient(timeout=None, limits=limits) as client:

        async def user() -> None:
            for prompt in waiting:
                samples.append(await _one(client, target, prompt, load.output_tokens))

        start = time.perf_counter()
        await asyncio.gather(*(user() for _ in range(load.concurrency)))
        seconds = time.perf_counter() - start
    return _summary(load, samples, seconds)


async def _one(client: httpx2.AsyncClient, target: Target, prompt: Sequence[int], num_tokens: int) -> Sample:
    body = {
        "model": target.model,
        "prompt": list(prompt),
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    sample = Sample()
    start = last = time.perf_counter()
    try:
        async with client.stream("POST", f"{target.url}/v1/completions", json=body) as response:
            if response.status_code != 200:
                sample.error = f"{response.status_code}: {(await response.aread())[:200].decode(errors='replace')}"
                return sample
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                now = time.perf_counter()
                chunk = _decode(line[6:])
                if chunk.error:
                    sample.error = chunk.error.message
                if chunk.usage:
                    sample.num_tokens = chunk.usage.completion_tokens
                if chunk.choices and chunk.choices[0].text:
                    if sample.ttft:
                        sample.gaps.append(now - last)
                    else:
                        sample.ttft = now - start
                    last = now
        if not sample.num_tokens and not sample.error:
            sample.error = "the answer says no usage, or no tokens"
    except (httpx2.HTTPError, msgspec.MsgspecError) as error:
        sample.error = repr(error)
    sample.end = time.perf_counter() - start
    return sample


def _summary(load: Load, samples: Sequence[Sample], seconds: float) -> Result:
    good = [sample for sample in samples if not sample.error]
    errors = [sample.error for sample in samples if sample.error]
    return Result(
        load=load,
        num_failed=len(errors),
        first_error=errors[0] if errors else "",
        seconds=seconds,
        tokens_per_second=sum(sample.num_tokens for sample in good) / seconds,
        ttft=_quantiles([sample.ttft for sample in good]),
        itl=_quantiles([gap for sample in good for gap in sample.gaps]),
        end_to_end=_quantiles([sample.end for sample in good]),
    )


def _quantiles(values: Sequence[float]) -> tuple[float, float, float]:
    if not values:
        return (0.0, 0.0, 0.0)
    ordered = sorted(values)
    at = [ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.95, 0.99)]
    return (statistics.median(ordered), at[0], at[1])
