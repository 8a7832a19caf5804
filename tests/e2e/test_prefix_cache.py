"""Prompts that are known are not computed again: not within a server's life, nor after a restart, nor after a crash."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from tests.e2e.pelton_process import Server, serving

RULES = " ".join(f"Rule {i}: answer question number {i} briefly, in plain words, and politely." for i in range(40))
SYSTEM = {"role": "system", "content": f"You are a helpful assistant. {RULES}"}


def ask(server: Server, question: str = "What is the capital of France?", **more: object) -> tuple[object, int]:
    """The first choice of an answer, and how many tokens of its prompt came from the cache."""
    body = {
        "model": "m",
        "messages": [SYSTEM, {"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 12,
        "logprobs": True,
        **more,
    }
    answer = server.post(body)
    assert answer.status_code == 200, answer.text
    whole = answer.json()
    usage = whole["usage"]
    assert usage["prompt_tokens"] > 600
    return whole["choices"][0], usage["prompt_tokens_details"]["cached_tokens"]


def until(is_so: Callable[[], object], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_system_prompt_is_there_after_a_restart_and_after_a_crash(tmp_path: Path, smollm2: Path):
    folder = tmp_path / "prefixes"
    options = (str(smollm2), "--served-name", "m", "--context", "2048", "--threads", "2")
    options += ("--prefix-cache-dir", str(folder), "--prefix-cache-size", "1")
    with serving(tmp_path, *options) as server:
        fresh, cached = ask(server)
        assert cached == 0
        until(lambda: list(folder.glob("*.prefix")))  # once the model's digest is known
        (engine,) = server.children()
        os.kill(engine, signal.SIGKILL)
        until(lambda: server.children() not in ([], [engine]))
        again, cached = ask(server)
        assert cached > 600
        assert again == fresh
        server.process.kill()
        server.process.wait()
    with serving(tmp_path, *options) as server:
        again, cached = ask(server)
        assert cached > 600
        assert again == fresh
        _, cached = ask(server, "And of Spain?")
        assert cached > 600
