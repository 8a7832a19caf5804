"""CPU time of the engine's thread outside the compiled core, per step.

    python benchmarks/host_time.py MODEL.gguf --streams 32

Runs the loop of the engine's process in this one: scheduling, batches, sampling's parameters, events, and their way to
the client's socket. Only this thread's CPU time counts, so other work on the machine shows no more than it disturbs the
caches. What counts are the steps in which all streams decode; now and then one of them begins a block of KV memory.
"""

import argparse
import cProfile
import pstats
import random
import socket
import statistics
import subprocess
import time
from typing import Any

from pelton.config import EngineConfig
from pelton.engine.engine import Engine, load
from pelton.engine.process import Peer, serve
from pelton.engine.protocol import Start, Stop
from pelton.request import EngineRequest, SamplingParams


class Metered:
    """Stands for the compiled program; sums the CPU time that is spent in it, and marks where each step begins."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self.seconds = 0.0
        self.marks: list[tuple[int, float]] = []
        """Tokens of each step, and the CPU time outside the core before it."""

    def run(self, ids: Any, *args: Any) -> Any:
        self.marks.append((len(ids), time.thread_time() - self.seconds))
        return self._timed(self._core.run, ids, *args)

    def sample(self, *args: Any) -> Any:
        return self._timed(self._core.sample, *args)

    def _timed(self, call: Any, *args: Any) -> Any:
        start = time.thread_time()
        try:
            return call(*args)
        finally:
            self.seconds += time.thread_time() - start

    def host_times(self, streams: int) -> list[float]:
        """Milliseconds outside the core of each step that gives every stream a token, to the next such step."""
        pairs = zip(self.marks, self.marks[1:], strict=False)
        return [1e3 * (after - before) for (a, before), (b, after) in pairs if a == b == streams]


class Driver(Peer):
    """A client that stops the loop when the work is done."""

    def __init__(self, descriptor: int, engine: Engine) -> None:
        super().__init__(descriptor)
        self._engine = engine

    def receive(self, timeout: int) -> Any:
        return super().receive(0) or (None if self._engine.has_work else Stop())


def submit(engine: Engine, args: argparse.Namespace) -> None:
    source = random.Random(0)
    params = SamplingParams(max_tokens=args.tokens, temperature=args.temperature, seed=0, ignore_eos=True)
    for i in range(args.streams):
        prompt = [source.randrange(1000, 20000) for _ in range(args.prompt)]
        engine.submit(EngineRequest(id=f"cmpl-{source.getrandbits(96):x}-{i}", prompt_ids=prompt, sampling=params))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--profile", action="store_true", help="also name the functions that take the time")
    args = parser.parse_args()
    config = EngineConfig(context=args.prompt + args.tokens + 1, max_sequences=args.streams, speculation="off")
    engine = load(Start(args.model, config))
    executor: Any = engine.runner._executor
    core = executor._core = Metered(executor._core)
    submit(engine, args)
    ours, theirs = socket.socketpair()
    with subprocess.Popen(["cat"], stdin=theirs, stdout=subprocess.DEVNULL):  # somebody who reads
        theirs.close()
        driver = Driver(ours.detach(), engine)
        if args.profile:
            profile = cProfile.Profile()
            profile.runcall(serve, engine, driver)
            pstats.Stats(profile).sort_stats("tottime").print_stats(20)
        else:
            serve(engine, driver)
        driver.close()
    engine.close()
    times = sorted(core.host_times(args.streams))
    print(
        f"{args.streams} streams, {len(times)} steps: {statistics.median(times):.3f} ms a step outside the core "
        f"(median), p95 {times[int(0.95 * len(times))]:.3f}"
    )


if __name__ == "__main__":
    main()
