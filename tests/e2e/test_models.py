"""Several models in one server, each in an engine process of its own: they share a budget, come, leave and die."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx
import openai
import pytest

from tests.e2e.pelton_process import Server, pelton, serving

MODELS = """\
[models.one]
model = "{path}"
aliases = ["gpt-4o-mini"]
preload = true

[models.two]
model = "{path}"
kv_dtype = "int8"

[models.three]
model = "{path}"
keep_alive = "1s"

[models.huge]
model = "{path}"
kv_memory = 9000000000

[models.absent]
model = "smollm2"
"""
SETTINGS = ("--memory-budget", "800MB", "--context", "512", "--threads", "1", "--max-sequences", "4")
EACH = 390e6
"""Bytes that such a model is planned to take at most: two fit, and a third does not."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("home")
    file = home / "models.toml"
    file.write_text(MODELS.format(path=smollm2), encoding="utf-8")
    with serving(home, "--models-file", str(file), *SETTINGS) as each:
        each.home = home  # type: ignore[attr-defined]
        yield each


def ask(server: Server, model: str, max_tokens: int = 8) -> httpx.Response:
    messages = [{"role": "user", "content": "What is 2+2?"}]
    return server.post({"model": model, "messages": messages, "temperature": 0, "max_tokens": max_tokens})


def loaded(server: Server) -> dict[str, dict]:
    return {each["name"]: each for each in httpx.get(f"{server.url}/pelton/models").json()["data"]}


def private_memory(pids: list[int]) -> int:
    """Bytes of processes that are no file's."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                total += int(line.split()[1]) * 1024
    return total


def test_models_share_memory_and_the_one_used_longest_ago_leaves(server: Server) -> None:
    assert list(loaded(server)) == ["one"]
    assert ask(server, "gpt-4o-mini").json()["choices"][0]["message"]["content"]
    assert ask(server, "two").status_code == 200
    both = loaded(server)
    assert sorted(both) == ["one", "two"]
    assert sorted(server.engines()) == sorted(each["pid"] for each in both.values())
    for each in both.values():
        assert private_memory([each["pid"]]) < each["memory"] < EACH
        assert each["weight_bytes"] + each["kv_bytes"] + each["arena_bytes"] < each["memory"]
    assert ask(server, "one").status_code == 200
    assert ask(server, "three").status_code == 200
    assert sorted(loaded(server)) == ["one", "three"]
    assert not Path(f"/proc/{both['two']['pid']}").exists()
    assert len(server.engines()) == 2
    assert private_memory(server.engines()) < 2 * EACH
    memory = httpx.get(f"{server.url}/pelton/models").json()["memory"]
    assert (memory["budget"], memory["used"] <= 800e6) == (800_000_000, True)
    deadline = time.monotonic() + 10
    while "three" in loaded(server):  # it stays unused for a second
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_answers_under_way_end_before_a_model_leaves(server: Server) -> None:
    texts = [ask(server, name, 48).json()["choices"][0]["message"]["content"] for name in ("one", "two", "three")]
    names = ["one", "two", "three", "one", "three", "two"]
    with ThreadPoolExecutor(6) as clients:
        answers = list(clients.map(lambda name: ask(server, name, 48), names))
    assert [answer.status_code for answer in answers] == [200] * 6
    alone = dict(zip(("one", "two", "three"), texts, strict=True))
    assert [answer.json()["choices"][0]["message"]["content"] for answer in answers] == [alone[name] for name in names]


def test_a_model_that_cannot_fit_is_refused_with_numbers(server: Server) -> None:
    before = loaded(server)
    answer = ask(server, "huge")
    assert (answer.status_code, answer.json()["error"]["code"]) == (507, "insufficient_memory")
    assert "the model huge needs at least" in answer.json()["error"]["message"]
    assert "MiB" in answer.json()["error"]["message"]
    assert {name for name in before if before[name]["expires_at"] is None} <= set(loaded(server))


def test_what_is_not_here_is_neither_listed_nor_fetched(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["huge", "one", "three", "two"]
    assert client.models.retrieve("gpt-4o-mini").id == "one"
    for name in ("absent", "smollm2", "nothing", "../../x.gguf"):
        assert ask(server, name).status_code == 404


def test_the_death_of_one_engine_leaves_the_others(server: Server) -> None:
    assert (ask(server, "one").status_code, ask(server, "two").status_code) == (200, 200)
    pids = {name: each["pid"] for name, each in loaded(server).items()}
    os.kill(pids["one"], signal.SIGKILL)
    assert ask(server, "two").status_code == 200
    deadline = time.monotonic() + 30
    while ask(server, "one").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    after = loaded(server)
    assert after["two"]["pid"] == pids["two"]
    assert after["one"]["pid"] != pids["one"]


def test_the_command_line_shows_and_unloads(server: Server) -> None:
    home: Path = server.home  # type: ignore[attr-defined]
    assert ask(server, "two").status_code == 200
    shown = pelton(home, "ps", "--url", server.url)
    assert "two" in shown.stdout
    assert "of 800.0 MB are taken" in shown.stdout
    pid = loaded(server)["two"]["pid"]
    assert pelton(home, "stop", "two", "--url", server.url).stdout == "two is unloaded\n"
    assert not Path(f"/proc/{pid}").exists()
    again = pelton(home, "stop", "two", "--url", server.url)
    assert (again.returncode, "the model 'two' is not loaded" in again.stderr) == (1, True)
    nobody = pelton(home, "ps", "--url", "http://127.0.0.1:9")
    assert (nobody.returncode, "no server answers at http://127.0.0.1:9" in nobody.stderr) == (1, True)


def test_loading_and_unloading_over_http(server: Server) -> None:
    url = f"{server.url}/pelton/models"
    told = httpx.post(f"{url}/load", json={"model": "three", "keep_alive": -1}, timeout=60).json()
    assert (told["name"], told["state"]) == ("three", "ready")
    assert loaded(server)["three"]["expires_at"] is None
    assert httpx.post(f"{url}/unload", json={"model": "three"}, timeout=60).json()["unloaded"] is True
    assert "three" not in loaded(server)
    assert httpx.post(f"{url}/load", json={"model": "three", "color": 1}).status_code == 400
    assert httpx.get(f"{url}/store").json()["data"] == []


def test_the_plan_is_what_is_loaded(server: Server, smollm2: Path) -> None:
    home: Path = server.home  # type: ignore[attr-defined]
    options = ("--context", "512", "--threads", "1", "--max-sequences", "4")
    done = pelton(home, "plan", str(smollm2), "--json", *options)
    plan = json.loads(done.stdout)
    assert ask(server, "one").status_code == 200
    one = loaded(server)["one"]
    assert (plan["weight_bytes"], plan["arena_bytes"]) == (one["weight_bytes"], one["arena_bytes"])
    assert (plan["fits"], plan["context"], plan["trained_context"]) == (True, 512, 512)
    assert plan["streams"][-1] == {"tokens": 512, "streams": 4}
    words = pelton(home, "plan", str(smollm2), "--memory-budget", "700MB", *options).stdout
    assert "can be loaded" in words
    assert "recommended: --context 512 --kv-dtype f16" in words
    refused = pelton(home, "plan", str(smollm2), "--memory-budget", "250MB")
    assert (refused.returncode, "cannot be loaded" in refused.stdout) == (1, True)
