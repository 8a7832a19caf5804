"""How long streams wait for their next token while a long prompt comes in.

    python benchmarks/stall.py MODEL.gguf --streams 16 --prompt 4000

Streams decode in an engine process as `pelton serve` runs it; then a long prompt arrives. Prints the gaps between
tokens, as the streams' reader sees them, before it came and until its first token, beside the target; and how long
that first token took.
"""

import argparse
import asyncio
import json
import random
import time
from pathlib import Path

from pelton.config import EngineConfig
from pelton.engine.client import EngineClient
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
    """In milliseconds."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))] * 1000


async def collect(followed: Streams) -> list[float]:
    """The gaps of some seconds."""
    followed.gaps.clear()
    await asyncio.sleep(3)
    gaps, followed.gaps = followed.gaps, []
    return gaps


async def measure(model: Path, streams: int, prompt: int, target: float, threads: int) -> dict[str, float]:
    client = EngineClient(model, EngineConfig(target_itl=target, threads=threads, prefix_cache=False))
    await client.start()
    try:
        followed = Streams(client, streams)
        while followed.num_begun < streams:
            await asyncio.sleep(0.01)
        plain = await collect(followed)
        began = time.perf_counter()
        async for event in client.submit(ask("long", prompt, 1, 99)):
            if isinstance(event, TokenEvent):
                break
        first = time.perf_counter() - began
        beside, followed.gaps = followed.gaps, []
        plain += await collect(followed)
        for task in followed.tasks:
            task.cancel()
        await asyncio.gather(*followed.tasks, return_exceptions=True)
    finally:
        await client.close()
    typical = percentile(plain, 0.5)
    return {
        "plain_p50_ms": typical,
        "plain_p99_ms": percentile(plain, 0.99),
        "target_ms": target or max(50.0, 2 * typical),
        "beside_p50_ms": percentile(beside, 0.5),
        "beside_p99_ms": percentile(beside, 0.99),
        "beside_max_ms": percentile(beside, 1.0),
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
    found = asyncio.run(measure(args.model, args.streams, args.prompt, args.target_itl, args.threads))
    if args.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:16} {value:10.1f}")
    print(f"p99 / target     {found['beside_p99_ms'] / found['target_ms']:10.2f}")


if __name__ == "__main__":
    main()
