"""Prompts that are known are not computed again: not within a server's life, nor after a restart, nor after a crash."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import httpx2 as httpx

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
        (engine,) = server.engines()
        os.kill(engine, signal.SIGKILL)
        until(lambda: server.engines() not in ([], [engine]))
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


def test_within_a_life(tmp_path: Path, smollm2: Path):
    """Salts, choices, a chat's second turn, and pins."""
    with serving(tmp_path, str(smollm2), "--served-name", "m", "--context", "2048", "--threads", "2") as server:
        first, cached = ask(server)
        assert cached == 0
        assert ask(server, cache_salt="mine") == (first, 0)
        again, cached = ask(server, cache_salt="mine")
        assert (again, cached > 600) == (first, True)

        answer = first["message"]["content"]  # type: ignore[index]
        turns = [SYSTEM, {"role": "user", "content": "What is the capital of France?"}]
        turns += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And of Spain?"}]
        _, first_turns = ask(server)
        _, cached = ask(server, messages=turns)
        assert cached > first_turns + 5, "the answer's own tokens are cached, too"

        body = {"model": "m", "messages": [SYSTEM, {"role": "user", "content": "Name a colour."}], "max_tokens": 2}
        usage = server.post({**body, "n": 3}).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 600
        assert usage["prompt_tokens"] < 2 * usage["prompt_tokens_details"]["cached_tokens"]

        pins = f"{server.url}/v1/prefix_cache/pins"
        made = httpx.post(pins, json={"model": "m", "messages": [SYSTEM], "ttl": 60}, timeout=60)
        assert made.status_code == 200, made.text
        pin = made.json()
        assert pin["num_tokens"] > 600
        assert 59 < pin["expires_at"] - pin["created_at"] < 61
        assert httpx.get(pins).json() == {"object": "list", "data": [pin]}
        assert httpx.delete(f"{pins}/{pin['id']}").json() == {
            "id": pin["id"],
            "object": "prefix_cache.pin",
            "deleted": True,
        }
        until(lambda: httpx.get(pins).json()["data"] == [])
        assert httpx.delete(f"{pins}/{pin['id']}").status_code == 404

        for wrong, status, field in (
            ({"model": "m", "messages": [SYSTEM], "ttl": 0}, 400, "ttl"),
            ({"model": "m", "messages": [SYSTEM]}, 400, None),
            ({"model": "m", "ttl": 60}, 400, "messages"),
            ({"model": "m", "prompt": "Hi", "ttl": 60}, 400, "prompt"),
            ({"model": "m", "prompt": "Hi " * 3000, "ttl": 60}, 400, "prompt"),
            ({"model": "m", "prompt": "Hi", "ttl": 60, "colour": 1}, 400, "colour"),
            ({"model": "other", "prompt": "Hi", "ttl": 60}, 404, "model"),
        ):
            refused = httpx.post(pins, json=wrong, timeout=60)
            assert (refused.status_code, refused.json()["error"]["param"]) == (status, field), refused.text
        made = httpx.post(pins, json={"model": "m", "messages": [SYSTEM], "ttl": 1}, timeout=60)
        until(lambda: httpx.get(pins).json()["data"] == [])
