"""What HTTP costs: the same load on the engine in a process of its own, and through `pelton serve`, in turn.

    python benchmarks/http_path.py MODEL.gguf --streams 32 --rounds 3

Prints tokens per second both ways and their ratio, and for each process the CPU time that it takes per token. On a
machine whose cores are all the engine's, what the server takes is taken from the engine.
"""

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

from pelton.bench.serving.drive import drive
from pelton.bench.serving.http import Address
from pelton.bench.serving.load import Lengths, Load
from pelton.bench.serving.target import find

TICK = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13])) / TICK


def engines(pid: int) -> list[int]:
    """Of a server."""
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [child for child in children if b"pelton.engine.process" in Path(f"/proc/{child}/cmdline").read_bytes()]


class Server:
    def __init__(self, model: str) -> None:
        command = [sys.executable, "-m", "pelton.cli", "serve", model, "--served-name", "m", "--port", "0"]
        self.process = subprocess.Popen([*command, "--context", "2048"], stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        address = next(found[1] for line in self.process.stderr if (found := re.search(r"is ready at (\S+)", line)))
        self.target = asyncio.run(find("m", Address(address)))
        (self.engine,) = engines(self.process.pid)

    def run(self, args: argparse.Namespace, seed: int) -> tuple[float, float, float]:
        """Tokens per second; CPU milliseconds per token of the server's process, and of the engine's."""
        prompt, output = Lengths(args.prompt, args.prompt), Lengths(args.tokens, args.tokens)
        load = Load(args.streams, None, args.streams, prompt, output, num_warm_up=0, seed=seed)
        before = cpu_seconds(self.process.pid), cpu_seconds(self.engine)
        result = asyncio.run(drive(self.target, load))
        assert not result.failures, result.failures
        after = cpu_seconds(self.process.pid), cpu_seconds(self.engine)
        count = args.streams * args.tokens
        server, engine = (1e3 * (b - a) / count for a, b in zip(before, after, strict=True))
        return result.tokens_per_second, server, engine


class Alone:
    def __init__(self, model: str) -> None:
        worker = Path(__file__).with_name("worker_pelton.py")
        command = [sys.executable, str(worker), model, str(os.cpu_count() or 1)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.process.stdout.readline()

    def run(self, args: argparse.Namespace, seed: int) -> tuple[float, float]:
        """Tokens per second, and CPU milliseconds per token."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        prompts = [[1000 + (seed + 37 * i + j) % 19000 for j in range(args.prompt)] for i in range(args.streams)]
        before, start = cpu_seconds(self.process.pid), time.perf_counter()
        self.process.stdin.write(json.dumps({"work": "decode", "prompts": prompts, "tokens": args.tokens - 1}) + "\n")
        self.process.stdin.flush()
        self.process.stdout.readline()
        count = args.streams * args.tokens
        seconds, used = time.perf_counter() - start, cpu_seconds(self.process.pid) - before
        return count / seconds, 1e3 * used / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    server, alone = Server(args.model), Alone(args.model)
    ratios: list[float] = []
    for seed in range(args.rounds):
        direct, used = alone.run(args, seed)
        http, server_used, engine_used = server.run(args, seed)
        ratios.append(http / direct)
        print(
            f"in process {direct:.0f} tokens/s, {used:.2f} ms CPU a token; over HTTP {http:.0f} tokens/s "
            f"({100 * http / direct:.0f} %), {engine_used:.2f} ms in the engine and {server_used:.3f} in the server",
            flush=True,
        )
    print(f"over HTTP: {100 * statistics.median(ratios):.0f} % of in process (median)")
    server.process.terminate()
    server.process.wait()
    assert alone.process.stdin is not None
    alone.process.stdin.close()
    alone.process.wait()


if __name__ == "__main__":
    main()
