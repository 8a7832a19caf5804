"""CPU time of the engine's thread outside the compiled core, per step.

    python benchmarks/host_time.py MODEL.gguf --streams 32

Runs the loop of the engine's process in this one: scheduling, batches, sampling's parameters, events, and their way to
the client's socket. Only this thread's CPU time counts, so other work on the machine shows no more than it disturbs the
caches. What counts are the steps in which all streams decode, in most of which one of them begins a block of KV memory.
"""

import argparse
import functools
import random
import socket
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

from pelton.config import EngineConfig
from pelton.engine.engine import Engine, load
from pelton.engine.process import Peer, serve
from pelton.engine.protocol import Start, Stop
from pelton.ops.data import BLOCK_TOKENS
from pelton.request import EngineRequest, SamplingParams


class Metered:
    """Stands for the compiled program; sums the CPU time that is spent in it, and marks where each step begins."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self.seconds = 0.0
        self.on_step: Callable[[], None] = lambda: None
        self.marks: list[tuple[int, float]] = []
        """Tokens of each step, and the CPU time outside the core before it."""

    def run(self, step: Any) -> None:
        self._begin(step)
        self._timed(self._core.run, step)

    def sample(self, *args: Any) -> None:
        self._timed(self._core.sample, *args)

    def proceed(self, step: Any, *args: Any) -> Any:
        self._begin(step)
        return self._timed(self._core.proceed, step, *args)

    def _begin(self, step: Any) -> None:
        self.marks.append((step.num_tokens, time.thread_time() - self.seconds))
        self.on_step()

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


class Parts:
    """The CPU time of parts of the loop, each without those that it calls."""

    def __init__(self, core: Metered) -> None:
        self._core = core
        self._inner = [0.0]
        """Of the parts that run: what their own parts and the core have taken."""
        self._step: dict[str, float] = {}
        self.steps: list[dict[str, float]] = []

    def watch(self, owner: Any, name: str) -> None:
        """Make a function or method of `owner` a part."""
        call = getattr(owner, name)
        label = f"{getattr(owner, '__name__', type(owner).__name__)}.{name}".rpartition("engine.")[2]

        @functools.wraps(call)
        def timed(*args: Any, **named: Any) -> Any:
            start, core = time.thread_time(), self._core.seconds
            self._inner.append(0.0)
            result = call(*args, **named)
            spent = time.thread_time() - start - (self._core.seconds - core)
            own = spent - self._inner.pop()
            self._inner[-1] += spent
            self._step[label] = self._step.get(label, 0.0) + own
            return result

        setattr(owner, name, timed)

    def turn(self) -> None:
        """A step begins."""
        self.steps.append(self._step)
        self._step = {}

    def table(self, kept: list[bool]) -> str:
        """The median of each part over the kept steps."""
        steps = [step for step, is_kept in zip(self.steps[1:], kept, strict=False) if is_kept]
        medians = {
            label: statistics.median(step.get(label, 0.0) for step in steps) for label in {k for s in steps for k in s}
        }
        rows = sorted(medians.items(), key=lambda each: -each[1])
        return "\n".join(f"{1e3 * seconds:8.3f} ms  {label}" for label, seconds in rows)


def submit(engine: Engine, args: argparse.Namespace) -> None:
    source = random.Random(0)
    params = SamplingParams(max_tokens=args.tokens, temperature=args.temperature, seed=0, ignore_eos=True)
    for i in range(args.streams):
        length = args.prompt + i % BLOCK_TOKENS  # so that they begin blocks of KV memory in turn, as streams do
        prompt = [source.randrange(1000, 20000) for _ in range(length)]
        engine.submit(EngineRequest(id=f"cmpl-{source.getrandbits(96):x}-{i}", prompt_ids=prompt, sampling=params))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--speculation", choices=("auto", "off"), default="off")
    parser.add_argument("--profile", action="store_true", help="also name the parts that take the time")
    args = parser.parse_args()
    config = EngineConfig(
        context=args.prompt + BLOCK_TOKENS + args.tokens, max_sequences=args.streams, speculation=args.speculation
    )
    engine = load(Start(args.model, config))
    executor: Any = engine.runner._executor
    core = executor._core = Metered(executor._core)
    submit(engine, args)
    ours, theirs = socket.socketpair()
    with subprocess.Popen(["cat"], stdin=theirs, stdout=subprocess.DEVNULL):  # somebody who reads
        theirs.close()
        driver = Driver(ours.detach(), engine)
        parts = Parts(core)
        if args.profile:
            core.on_step = parts.turn
            for owner, *names in (
                (driver, "receive", "send"),
                (engine, "advance", "step", "_take_news", "_go_on", "_compute", "_draw", "_observe", "message"),
                (engine.scheduler, "schedule", "commit"),
                (engine.scheduler.steady, "go_on", "settle"),
                (engine._batches, "of", "can_keep"),
                (engine.runner, "submit", "proceed"),
                (engine._sampling, "arrays"),
                (engine._answers, "add"),
                (engine.pace, "observe"),
            ):
                for name in names:
                    parts.watch(owner, name)
        serve(engine, driver)
        driver.close()
    engine.close()
    if args.profile:
        print(parts.table([a == b == args.streams for (a, _), (b, _) in zip(core.marks, core.marks[1:], strict=False)]))
    times = sorted(core.host_times(args.streams))
    print(
        f"{args.streams} streams, {len(times)} steps: {statistics.median(times):.3f} ms a step outside the core "
        f"(median), p95 {times[int(0.95 * len(times))]:.3f}"
    )


if __name__ == "__main__":
    main()
