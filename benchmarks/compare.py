"""Pelton beside its peers: the same model file, the same work, the same threads, in one interleaved run.

    python benchmarks/compare.py MODEL.gguf --peer llama.cpp=PYTHON --threads 2 --repeat 5

Each engine is a worker process of its own, loaded once. Every round of a work runs it on every engine in turn, so that
a slow phase of the machine falls on all of them alike; the table shows medians over the rounds and, for peers, the
median of the per-round ratios. Before each of its rounds Pelton measures what the machine can do; its share is of the
time that memory or arithmetic, whichever allows less, would take for the weights, keys and values of the work.
PYTHON is the interpreter of a virtual environment that has the peer's package.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
WORKERS = {
    "pelton": "worker_pelton.py",
    "llama.cpp": "worker_llama_cpp.py",
    "transformers": "worker_transformers.py",
}


def prompt_of(length: int, seed: int) -> list[int]:
    """Token ids that every vocabulary here has, without meaning and without repeats that a cache could use."""
    state, ids = seed * 7919 + 1, []
    for _ in range(length):
        state = (state * 1103515245 + 12345) % (1 << 31)
        ids.append(1000 + state % 20000)
    return ids


def works(names: list[str]) -> dict[str, dict[str, Any]]:
    """Name -> job."""
    jobs = {
        "decode, 1 stream": {"work": "decode", "prompts": [prompt_of(16, 1)], "tokens": 128},
        "decode at 8k context": {"work": "decode", "prompts": [prompt_of(8064, 4)], "tokens": 32},
        "prompt of 512": {"work": "prompt", "prompts": [prompt_of(512, 2)]},
        "prompt of 2048": {"work": "prompt", "prompts": [prompt_of(2048, 3)]},
        "decode, 16 streams": {"work": "decode", "prompts": [prompt_of(64, s) for s in range(16)], "tokens": 48},
        "decode, 32 streams (128 in / 128 out)": {
            "work": "decode",
            "prompts": [prompt_of(128, s) for s in range(32)],
            "tokens": 128,
        },
    }
    return {name: job for name, job in jobs.items() if not names or any(part in name for part in names)}


@dataclass
class Engine:
    name: str
    python: str
    model: str
    threads: int
    rates: dict[str, list[float]] = field(default_factory=dict)
    shares: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        command = [self.python, str(HERE / WORKERS[self.name]), self.model, str(self.threads)]
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the worker
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True
        )
        self.ready = self._read()["ready"]

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        self.log.seek(0)
        raise SystemExit(f"{self.name}: its worker ended with code {self.process.wait()}\n{self.log.read()[-2000:]}")

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return self._read()

    def run(self, work: str, job: dict[str, Any]) -> None:
        answer = self.ask(job)
        self.rates.setdefault(work, []).append(answer["tokens"] / answer["seconds"])
        if "least_seconds" in answer:
            self.shares.setdefault(work, []).append(answer["least_seconds"] / answer["seconds"])

    def forget(self, work: str) -> None:
        """Leave out what was measured of a work so far."""
        self.rates.pop(work, None)
        self.shares.pop(work, None)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def table(engines: list[Engine], jobs: dict[str, dict[str, Any]]) -> str:
    """Markdown: medians in tokens per second, Pelton's ratio to each peer, and its share of the limit."""
    ours, peers = engines[0], engines[1:]
    head = ["work (tokens/s)", ours.name, *(p.name for p in peers), *(f"{ours.name} / {p.name}" for p in peers)]
    head.append("share of the machine's limit")
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for work in jobs:
        medians = [statistics.median(engine.rates[work]) for engine in engines]
        ratios = [statistics.median(a / b for a, b in zip(ours.rates[work], p.rates[work], strict=True)) for p in peers]
        cells = [work, *(f"{m:.1f}" for m in medians), *(f"{r:.2f}x" for r in ratios)]
        cells.append(f"{100 * statistics.median(ours.shares[work]):.0f} %")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write(page: Path, mark: str, text: str) -> None:
    """Put the text between the page's marks `<!-- MARK -->` and `<!-- end -->`."""
    opening = f"<!-- {mark} -->"
    before, found, rest = page.read_text().partition(opening)
    if not found:
        raise SystemExit(f"{page} has no line {opening}")
    after = rest.partition("<!-- end -->")[2]
    page.write_text(f"{before}{opening}\n{text}<!-- end -->{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the table into a page that has a place for it")
    parser.add_argument("--only", action="append", default=[], help="a part of a work's name")
    args = parser.parse_args()
    pairs = [("pelton", sys.executable), *(peer.split("=", 1) for peer in args.peer)]
    jobs = works(args.only)
    engines = [Engine(name, python, args.model, args.threads) for name, python in pairs]
    for engine in engines:
        print(f"{engine.name}: {engine.ready}", file=sys.stderr)
    for work, job in jobs.items():
        for round_number in range(args.repeat + 1):
            for engine in engines:
                engine.run(work, job)
                if round_number == 0:
                    engine.forget(work)  # the first round warms up
        print(f"{work}: done", file=sys.stderr)
    for engine in engines:
        engine.close()
    title = f"{Path(args.model).name}, {args.threads} threads, median of {args.repeat} rounds"
    text = f"{title}\n\n{table(engines, jobs)}\n"
    print(text)
    if args.write is not None:
        write(args.write, f"speed {Path(args.model).stem}", text)


if __name__ == "__main__":
    main()
