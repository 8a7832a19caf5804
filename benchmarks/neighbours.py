"""Two engines on the same cores, and an engine beside a program that keeps every core busy.

    python benchmarks/neighbours.py MODEL.gguf --rounds 5 [--http]

Each engine decodes in a process of its own with all cores' threads, or behind a `pelton serve` of its own (`--http`),
whose steps are the gaps between what its clients read; in each round one runs alone, then both at once,
then one beside a neighbour, so that slow phases of the machine meet all of them. Printed: what share of its lone
speed each of the two has, and how long the longest step beside the neighbour is, in medians. The neighbour computes
without a pause on one core or, as a program whose threads spin while they wait for each other, on all.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from typing import Protocol
from urllib.parse import urlsplit

CORES = len(os.sched_getaffinity(0))


def work(path: str, streams: int, threads: int) -> None:
    """An engine: decodes for as many seconds as each line of the input says, and answers with its steps' times."""
    from pelton.config import EngineConfig
    from pelton.engine.engine import load
    from pelton.engine.protocol import Start
    from pelton.request import EngineRequest, SamplingParams

    engine = load(Start(path, EngineConfig(threads=threads, context=1024, max_sequences=streams, speculation="off")))
    sampling = SamplingParams(max_tokens=900, temperature=0, seed=0, ignore_eos=True)
    num_jobs = 0
    print("ready", flush=True)
    for line in sys.stdin:
        seconds, num_jobs = float(line), num_jobs + 1
        for i in range(streams):
            ids = [1000 + 37 * i + j for j in range(16)]
            engine.submit(EngineRequest(id=f"{num_jobs}-{i}", prompt_ids=ids, sampling=sampling))
        engine.step()
        times: list[float] = []
        end = time.perf_counter() + seconds
        while engine.has_work and time.perf_counter() < end:
            start = time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - start)
        for i in range(streams):
            engine.abort(f"{num_jobs}-{i}")
        while engine.has_work:
            engine.step()
        print(json.dumps(times), flush=True)


class Worker(Protocol):
    def start(self, seconds: float) -> None: ...
    def times(self) -> list[float]:
        """Of the steps since `start`, once its seconds are over."""
        ...

    def close(self) -> None: ...


class Engine:
    def __init__(self, args: argparse.Namespace) -> None:
        command = [sys.executable, __file__, args.model, "--work", "--streams", str(args.streams)]
        command += ["--threads", str(args.threads)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def start(self, seconds: float) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{seconds}\n")
        self.process.stdin.flush()

    def times(self) -> list[float]:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


class Served:
    """Clients of a server, each with a stream of its own."""

    def __init__(self, args: argparse.Namespace) -> None:
        command = [sys.executable, "-m", "pelton.cli", "serve", args.model, "--served-name", "m", "--port", "0"]
        command += ["--context", "1024", "--threads", str(args.threads), "--speculation", "off"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        address = next(found[1] for line in self.process.stderr if (found := re.search(r"is ready at (\S+)", line)))
        threading.Thread(target=self.process.stderr.read, daemon=True).start()
        self.host, self.port = urlsplit(address).hostname, urlsplit(address).port
        self.num_streams = args.streams

    def start(self, seconds: float) -> None:
        self.gaps: list[float] = []
        self.num_begun = 0
        self.clients = threading.Thread(target=lambda: asyncio.run(self._follow_all(seconds)))
        self.clients.start()

    async def _follow_all(self, seconds: float) -> None:
        self.have_begun = asyncio.Event()
        clients = [asyncio.create_task(self._follow(i)) for i in range(self.num_streams)]
        begun = asyncio.create_task(self.have_begun.wait())
        await asyncio.wait([*clients, begun], return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait(clients, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        begun.cancel()
        for client in clients:
            client.cancel()
        for end in await asyncio.gather(*clients, return_exceptions=True):
            if isinstance(end, Exception):
                raise end

    async def _follow(self, number: int) -> None:
        body = {"model": "m", "prompt": [1000 + 37 * number + j for j in range(16)], "max_tokens": 900, "stream": True}
        data = json.dumps(body | {"temperature": 0, "ignore_eos": True}).encode()
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {self.host}\r\nContent-Length: {len(data)}\r\n\r\n"
            writer.write(head.encode() + data)
            last = None
            while line := await reader.readline():
                if line.startswith(b"data: {"):
                    now = time.perf_counter()
                    if last is None:
                        self.num_begun += 1
                    elif self.have_begun.is_set():
                        self.gaps.append(now - last)
                    if self.num_begun == self.num_streams:
                        self.have_begun.set()
                    last = now
        finally:
            writer.close()

    def times(self) -> list[float]:
        self.clients.join()
        return self.gaps

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()


def busy() -> None:
    while True:
        sum(range(10_000))


def run(engines: list[Worker], seconds: float) -> list[list[float]]:
    for engine in engines:
        engine.start(seconds)
    return [engine.times() for engine in engines]


def beside(engine: Worker, num_busy: int, seconds: float) -> list[float]:
    neighbours = [multiprocessing.Process(target=busy, daemon=True) for _ in range(num_busy)]
    for neighbour in neighbours:
        neighbour.start()
    try:
        time.sleep(0.2)
        return run([engine], seconds)[0]
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.join()


def speed(times: list[float]) -> float:
    return len(times) / sum(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--threads", type=int, default=CORES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each run")
    parser.add_argument("--http", action="store_true", help="through `pelton serve`")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.model, args.streams, args.threads)
        return
    engines: list[Worker] = [(Served if args.http else Engine)(args) for _ in range(2)]
    shares: list[float] = []
    neighbours = {"one core busy": 1, "all cores busy": CORES}
    longest: dict[str, list[float]] = {"alone": [], **{kind: [] for kind in neighbours}}
    try:
        for _ in range(args.rounds):
            alone = run(engines[:1], args.seconds)[0]
            both = [speed(times) / speed(alone) for times in run(engines, args.seconds)]
            beside_times = {kind: beside(engines[0], count, args.seconds) for kind, count in neighbours.items()}
            shares.append(min(both))
            line = [f"alone {speed(alone):.1f} steps/s; both: " + ", ".join(f"{100 * share:.0f} %" for share in both)]
            for kind, times in {"alone": alone, **beside_times}.items():
                longest[kind].append(max(times) / statistics.median(times))
                line.append(
                    f"{kind}: {speed(times) / speed(alone):.2f} of alone, longest step {longest[kind][-1]:.1f}x"
                )
            print("; ".join(line), flush=True)
    finally:
        for engine in engines:
            engine.close()
    print(f"both at once: the slower has {100 * statistics.median(shares):.0f} % of its lone speed (median)")
    for kind, ratios in longest.items():
        print(f"{kind}: the longest step takes {statistics.median(ratios):.1f}x the median step (median of the rounds)")


if __name__ == "__main__":
    main()
