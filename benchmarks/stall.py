"""How long streams wait for their next token while a long prompt comes in.

    python benchmarks/stall.py MODEL.gguf --streams 16 --prompt 4000

Streams decode in an engine process as `pelton serve` runs it; then a long prompt arrives. Prints the gaps between
tokens, as the streams' reader sees them, before it came, until its first token, and after that; and how long that first
token took. Unless a target is set it is a multiple of a plain step, which takes longer as the streams grow: hundreds of
tokens each while the prompt comes in. So each gap is compared with the target of its time, between what the plain steps
before and after the prompt say.
"""

import argparse
import asyncio
import json
import random
import time
from pathlib import Path
from statistics import median

from pelton.config import EngineConfig
from pelton.engine.client import EngineClient
from pelton.engine.pace import PLAIN_STEPS, TARGET
from pelton.request import EngineRequest, SamplingParams, TokenEvent


def ask(id: str, length: int, max_tokens: int, seed: int) -> EngineRequest:
    """A request of random tokens that does not end before its time."""
    rng = random.Random(seed)
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=0, ignore_eos=True)
    return EngineRequest(id=id, prompt_ids=[rng.randrange(100, 1000) for _ in range(length)], sampling=sampling)


class Streams:
    """What the readers of all streams see."""

    def __init__(self, client: EngineClient, count: int) -> None:
        self._client = client
        self.num_begun = 0
        self.gaps: list[float] = []
        self.tasks = [asyncio.create_task(self._follow(ask(str(i), 30, 4000, i))) for i in range(count)]

    async def _follow(self, request: EngineRequest) -> None:
        last = None
        async for event in self._client.submit(request):
            if isinstance(event, TokenEvent):
                now = time.perf_counter()
                if last is None:
                    self.num_begun += 1
                else:
                    self.gaps.append(now - last)
                last = now


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def targets(set_to: float, before: list[float], after: list[float], count: int) -> list[float]:
    """Of so many gaps, between plain ones before and after them."""
    first, last = (set_to or max(TARGET, PLAIN_STEPS * median(plain)) for plain in (before, after))
    return [first + (last - first) * number / max(1, count - 1) for number in range(count)]


async def collect(followed: Streams) -> list[float]:
    """The gaps of some seconds."""
    followed.gaps.clear()
    await asyncio.sleep(3)
    gaps, followed.gaps = followed.gaps, []
    return gaps


async def measure(model: Path, streams: int, prompt: int, target: float, threads: int) -> dict[str, float]:
    """`target` in seconds, 0: the engine's own."""
    client = EngineClient(model, EngineConfig(target_itl=1000 * target, threads=threads, prefix_cache=False))
    await client.start()
    try:
        followed = Streams(client, streams)
        while followed.num_begun < streams:
            await asyncio.sleep(0.01)
        before = await collect(followed)
        began = time.perf_counter()
        async for event in client.submit(ask("long", prompt, 1, 99)):
            if isinstance(event, TokenEvent):
                break
        first = time.perf_counter() - began
        beside, followed.gaps = followed.gaps, []
        after = await collect(followed)
        for task in followed.tasks:
            task.cancel()
        await asyncio.gather(*followed.tasks, return_exceptions=True)
    finally:
        await client.close()
    target_of = targets(target, before, after, len(beside))
    shares = [gap / target for gap, target in zip(beside, target_of, strict=True)]
    return {
        "plain_before_ms": 1000 * median(before),
        "plain_after_ms": 1000 * median(after),
        "target_before_ms": 1000 * target_of[0],
        "target_after_ms": 1000 * target_of[-1],
        "plain_p99_of_target": percentile(before, 0.99) / target_of[0],
        "beside_p50_ms": 1000 * percentile(beside, 0.5),
        "beside_p99_ms": 1000 * percentile(beside, 0.99),
        "beside_p50_of_target": percentile(shares, 0.5),
        "beside_p99_of_target": percentile(shares, 0.99),
        "num_gaps": len(beside),
        "first_token_s": first,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=4000, help="tokens of the long prompt")
    parser.add_argument("--target-itl", type=float, default=0.0, help="milliseconds; 0: the engine's own")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    args = parser.parse_args()
    found = asyncio.run(measure(args.model, args.streams, args.prompt, args.target_itl / 1000, args.threads))
    if args.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:20} {value:10.2f}")


if __name__ == "__main__":
    main()
