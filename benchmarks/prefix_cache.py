"""Time to the first token behind a long system prompt: computed, from memory, and from disk after a restart.

    python benchmarks/prefix_cache.py MODEL.gguf --tokens 1500 --repeat 5

Each prompt is asked for twice in a first server (computed, then from memory) and, when it has been written, in a second
one (from disk, with a warm page cache); there, a new prompt is computed beside each one that is read, so that a busy
machine slows both. Prompts are random token ids; the last 16 differ each time. Prints each time, medians and ratios.
"""

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LAST_IDS = 1000
"""Ids below this are in every vocabulary."""


@contextmanager
def serving(model: str, home: str) -> Iterator[str]:
    """The address of a server with that home."""
    command = [sys.executable, "-m", "pelton.cli", "serve", model, "--served-name", "m", "--port", "0"]
    process = subprocess.Popen(command, env={**os.environ, "PELTON_HOME": home}, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        found = next((m for line in process.stderr if (m := re.search(r"is ready at (\S+)", line))), None)
        if found is None:
            raise SystemExit("the server ended before it was ready")
        yield found[1]
    finally:
        process.terminate()
        process.wait()


def ask(url: str, prompt: list[int]) -> tuple[float, int]:
    """Seconds to the first token, and how many tokens of the prompt were cached."""
    ids = [*prompt, *random.choices(range(10, LAST_IDS), k=16)]
    options = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    body = {"model": "m", "prompt": ids, "max_tokens": 2, "temperature": 0, **options}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    begin, first, usage = time.perf_counter(), 0.0, None
    with urllib.request.urlopen(request) as response:
        for line in response:
            if line.startswith(b"data: {"):
                first = first or time.perf_counter() - begin
                usage = json.loads(line[6:]).get("usage") or usage
    assert usage is not None
    return first, usage["prompt_tokens_details"]["cached_tokens"]


def wait_until_written(folder: Path, num_files: int) -> None:
    while len(list(folder.glob("*.prefix"))) < num_files or list(folder.glob("*.partial")):
        time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    times: dict[str, list[float]] = {"computed": [], "memory": [], "disk": [], "computed beside": []}

    def note(kind: str, url: str, prompt: list[int]) -> None:
        seconds, cached = ask(url, prompt)
        times[kind].append(seconds)
        print(f"{kind}: {seconds * 1000:.1f} ms, {cached} tokens cached", flush=True)

    def new_prompt() -> list[int]:
        return random.choices(range(10, LAST_IDS), k=args.tokens)

    prompts = [new_prompt() for _ in range(args.repeat)]
    with tempfile.TemporaryDirectory(prefix="pelton-prefixes-") as home:
        with serving(args.model, home) as url:
            ask(url, new_prompt()[:100])
            for prompt in prompts:
                note("computed", url, prompt)
                note("memory", url, prompt)
            wait_until_written(Path(home, "prefixes"), args.repeat)
        with serving(args.model, home) as url:
            ask(url, new_prompt()[:100])
            for prompt in prompts:
                note("disk", url, prompt)
                note("computed beside", url, new_prompt())
    medians = {kind: statistics.median(found) for kind, found in times.items()}
    for kind, median in medians.items():
        print(f"median, {kind}: {median * 1000:.1f} ms")
    print(f"memory is {medians['computed'] / medians['memory']:.1f} times as fast as computing")
    print(f"disk is {medians['computed beside'] / medians['disk']:.1f} times as fast as computing")


if __name__ == "__main__":
    main()
