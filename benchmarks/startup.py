"""From `pelton serve` to ready and to the first token of a first request, with a warm page cache.

    python benchmarks/startup.py MODEL.gguf --repeat 5

Compares, in turn, starts that pack the weights anew with starts that read them packed from the cache folder (a
temporary one, filled first), beside the bar for the latter: 1.0 s + 0.3 s per GB of weights. Prints each start, the
medians, the CPU seconds of all processes of a start, and those that the imports of server and engine take alone.
Modules are compiled before, as those of an installed package are.
"""

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

IMPORTS = ["pelton.server.app", "pelton.engine.engine"]
WITH_BYTECODE = {"PYTHONDONTWRITEBYTECODE": ""}


def first_token(url: str) -> None:
    body = {"model": "m", "prompt": "Hi", "stream": True, "max_tokens": 4}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        for line in response:
            if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["text"]:
                return


def start(model: str, home: str, cache: bool, until_kept: bool = False) -> tuple[float, float]:
    """Seconds until ready, and until the first token, by the clock."""
    settings = {"PELTON_HOME": home, "PELTON_PACKED_CACHE_SIZE": "100" if cache else "0", **WITH_BYTECODE}
    begin = time.perf_counter()
    command = [sys.executable, "-m", "pelton.cli", "serve", model, "--served-name", "m", "--port", "0"]
    process = subprocess.Popen(command, env={**os.environ, **settings}, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if match := re.search(r"is ready at (\S+)", line):
                ready = time.perf_counter() - begin
                first_token(match[1])
                token = time.perf_counter() - begin
                while until_kept and not list(Path(home).glob("packed/*.packed")):
                    time.sleep(0.1)
                return ready, token
        raise SystemExit("the server ended before it was ready")
    finally:
        process.terminate()
        process.wait()


def cpu_seconds() -> float:
    """Of all processes that were begun here and have ended, with theirs."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def import_seconds(module: str) -> float:
    """CPU seconds of a fresh interpreter that imports a module."""
    before = cpu_seconds()
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True)
    return cpu_seconds() - before


def line(kind: str, seconds: Sequence[float]) -> str:
    ready, token, cpu = seconds
    return f"{kind}: ready after {ready:.2f} s, first token after {token:.2f} s, {cpu:.2f} s CPU"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    times: dict[str, list[tuple[float, ...]]] = {"packed anew": [], "from the cache": []}
    with tempfile.TemporaryDirectory(prefix="pelton-startup-") as home:
        start(args.model, home, cache=True, until_kept=True)
        weights = sum(path.stat().st_size for path in Path(home).glob("packed/*.packed")) / 1e9
        for _ in range(args.repeat):
            for kind, found in times.items():
                before = cpu_seconds()
                seconds = start(args.model, home, cache=kind == "from the cache")
                found.append((*seconds, cpu_seconds() - before))
                print(line(kind, found[-1]))
    for kind, found in times.items():
        print(line(f"median, {kind}", [statistics.median(column) for column in zip(*found, strict=True)]))
    print(f"{weights:.2f} GB of weights; the bar for a start from the cache is {1.0 + 0.3 * weights:.2f} s")
    for module in IMPORTS:
        print(f"import {module}: {statistics.median(import_seconds(module) for _ in range(5)):.2f} s CPU")


if __name__ == "__main__":
    main()
