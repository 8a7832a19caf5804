"""From `pelton serve` to the first token of a first request, with a warm page cache.

    python benchmarks/startup.py MODEL.gguf --repeat 5

Prints, for each start and as medians, the seconds until the port answers, until the first token, and the CPU seconds
that the imports of server and engine take on their own.
"""

import argparse
import json
import re
import resource
import statistics
import subprocess
import sys
import time
import urllib.request

IMPORTS = ["pelton.server.app", "pelton.engine.process"]


def first_token(url: str, model: str) -> None:
    body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "stream": True, "max_tokens": 4}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        for line in response:
            if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                return


def start(model: str) -> tuple[float, float]:
    """Seconds until ready, and until the first token."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "pelton.cli", "serve", model, "--served-name", "m", "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if match := re.search(r"is ready at (\S+)", line):
                ready = time.perf_counter() - begin
                first_token(match[1], "m")
                return ready, time.perf_counter() - begin
        raise SystemExit("the server ended before it was ready")
    finally:
        process.terminate()
        process.wait()


def import_seconds(module: str) -> float:
    """CPU seconds of a fresh interpreter that imports a module."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    start(args.model)  # warms the page cache
    times = []
    for _ in range(args.repeat):
        times.append(start(args.model))
        print(f"ready after {times[-1][0]:.2f} s, first token after {times[-1][1]:.2f} s")
    ready, token = (statistics.median(column) for column in zip(*times, strict=True))
    print(f"median: ready after {ready:.2f} s, first token after {token:.2f} s")
    for module in IMPORTS:
        print(f"import {module}: {statistics.median(import_seconds(module) for _ in range(5)):.2f} s CPU")


if __name__ == "__main__":
    main()
