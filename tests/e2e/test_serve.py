"""`pelton serve` with a real model, in a process of its own: what clients see, also when things die."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import httpx2 as httpx
import openai
import pytest

from tests.e2e.pelton_process import Server, cpu_seconds, serving

STORY = {"model": "m", "messages": [{"role": "user", "content": "Tell me a long story."}], "temperature": 0}
SHORT = {"model": "m", "messages": [{"role": "user", "content": "What is 2+2?"}], "temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def server(tmp_path_factory, smollm2) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("home")
    with serving(home, str(smollm2), "--served-name", "m", "--context", "1024", "--threads", "2") as each:
        yield each


def stream(server: Server, body: dict) -> Iterator[dict | str]:
    with httpx.stream(
        "POST", f"{server.url}/v1/chat/completions", json={**body, "stream": True}, timeout=120
    ) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: "):
                yield line[6:] if line == "data: [DONE]" else json.loads(line[6:])


def text_of(chunks: Iterator[dict | str]) -> str:
    return "".join(
        c["choices"][0]["delta"].get("content") or "" for c in chunks if isinstance(c, dict) and c["choices"]
    )


def test_the_real_client_gets_the_same_text_streamed_and_not(server):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    whole = client.chat.completions.create(**SHORT)
    assert "4" in whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "stop"
    assert text_of(stream(server, SHORT)) == whole.choices[0].message.content


def test_a_seeded_request_repeats_in_company(server):
    body = {**STORY, "temperature": 1, "seed": 11, "max_tokens": 24, "logprobs": True}
    alone = server.post(body).json()["choices"][0]
    others = [threading.Thread(target=server.post, args=({**STORY, "seed": i, "max_tokens": 48},)) for i in range(4)]
    for other in others:
        other.start()
    beside = server.post(body).json()["choices"][0]
    for other in others:
        other.join()
    assert beside["message"] == alone["message"]
    assert beside["logprobs"] == alone["logprobs"]


def test_a_prompt_over_the_context_is_refused_with_both_numbers(server):
    body = {**STORY, "messages": [{"role": "user", "content": "word " * 3000}]}
    for streamed in (False, True):
        answer = server.post({**body, "stream": streamed})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "1024" in error["message"]
        assert "30" in error["message"]


def test_an_idle_server_and_its_engine_sleep(server):
    assert server.post(SHORT).status_code == 200
    time.sleep(2)
    pids = [server.process.pid, *server.children()]
    before = [cpu_seconds(pid) for pid in pids]
    time.sleep(4)
    assert all(cpu_seconds(pid) - then < 0.2 for pid, then in zip(pids, before, strict=True))


def test_an_engine_that_dies_costs_only_what_was_in_flight(server):
    """Killed in the middle of 32 streams: each ends in one error event, at once, and the next request is answered."""
    begun = threading.Barrier(33)

    def follow(seed: int) -> tuple[list[dict | str], float]:
        chunks = stream(server, {**STORY, "seed": seed, "max_tokens": 900, "ignore_eos": True})
        seen = [next(chunks) for _ in range(3)]
        begun.wait(60)
        seen += list(chunks)
        return seen, time.monotonic()

    before = server.engines()
    assert len(before) == 1
    with ThreadPoolExecutor(32) as users:
        streams = [users.submit(follow, seed) for seed in range(32)]
        begun.wait(60)
        killed = time.monotonic()
        os.kill(before[0], signal.SIGKILL)
        for each in streams:
            seen, ended = each.result()
            assert ended - killed < 2
            assert isinstance(seen[-1], dict)
            assert seen[-1]["error"]["code"] == "engine_died"
            assert not any("error" in chunk for chunk in seen[:-1])
    assert httpx.get(f"{server.url}/health").status_code == 200
    again = server.post(SHORT)
    assert again.status_code == 200, again.text
    assert "4" in again.json()["choices"][0]["message"]["content"]
    assert server.engines() != before


def test_a_full_queue_says_so(tmp_path, smollm2):
    options = ("--max-sequences", "1", "--max-queue", "1", "--context", "1024")
    with serving(tmp_path, str(smollm2), "--served-name", "m", *options) as server:
        running = stream(server, {**STORY, "max_tokens": 900, "ignore_eos": True})
        next(running)
        with ThreadPoolExecutor(4) as users:
            asked = [users.submit(server.post, {**SHORT, "max_tokens": 1}) for _ in range(4)]
            refused = [each.result() for each in itertools.islice(as_completed(asked), 3)]
            running.close()  # the client goes away: the one that waits runs
        for answer in refused:
            assert answer.status_code == 429
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["type"] == "rate_limit_error"
            assert "wait" in answer.json()["error"]["message"]
        assert sorted(each.result().status_code for each in asked) == [200, 429, 429, 429]


def test_a_signal_drains(tmp_path, smollm2):
    with serving(tmp_path, str(smollm2), "--served-name", "m", "--context", "1024") as server:
        engine = server.engines()
        chunks = stream(server, {**STORY, "max_tokens": 300, "ignore_eos": True})
        seen = [next(chunks) for _ in range(3)]
        half_sent = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=20)
        half_sent.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: here\r\nContent-Length: 50\r\n\r\n{")
        assert httpx.get(f"{server.url}/health").status_code == 200  # so that the half is there too
        server.process.send_signal(signal.SIGTERM)
        with half_sent:  # it would come for as long as its client likes
            assert half_sent.recv(100).startswith(b"HTTP/1.1 503 ")
        deadline = time.monotonic() + 5
        while (health := httpx.get(f"{server.url}/health")).status_code == 200:
            assert time.monotonic() < deadline
        assert health.json() == {"status": "draining"}
        assert server.post(SHORT).status_code == 503
        seen += list(chunks)
        assert seen[-1] == "[DONE]"
        assert server.process.wait(20) == 0
        assert not [pid for pid in engine if _is_alive(pid)]


def test_a_second_signal_ends_at_once_and_quietly(tmp_path, smollm2):
    with serving(tmp_path, str(smollm2), "--served-name", "m", "--context", "4096") as server:
        engine = server.engines()
        chunks = stream(server, {**STORY, "max_tokens": 4000, "ignore_eos": True})
        next(chunks)
        server.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 10
        while not any("draining" in line for line in server.lines):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 0
        # The answer that was cut has a line, too.
        said = [line for line in server.lines if "pelton.access" not in line]
        assert "ending at once" in said[-1]
        assert not any("Traceback" in line for line in server.lines)
        assert not [pid for pid in engine if _is_alive(pid)]
        chunks.close()


def loading(server: Server, model: Path) -> list[int]:
    """The engine's process, once its model is being loaded: it has the file open, and the server hears signals."""
    deadline = time.monotonic() + 30
    while not ((engine := server.engines()) and _has_open(engine[0], model)):
        assert time.monotonic() < deadline
    assert _catches(server.process.pid, signal.SIGTERM)
    return engine


def _has_open(pid: int, model: Path) -> bool:
    with contextlib.suppress(OSError):
        return model.name in Path(f"/proc/{pid}/maps").read_text()
    return False


def _catches(pid: int, number: signal.Signals) -> bool:
    caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def test_a_signal_while_a_model_is_loaded_ends_that(tmp_path, smollm2):
    server = Server(tmp_path, str(smollm2))
    engine = loading(server, smollm2)
    began = time.monotonic()
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(20) == 0
    assert time.monotonic() - began < 8
    server.close()
    assert not [pid for pid in engine if _is_alive(pid)]
    assert not any("Traceback" in line for line in server.lines)
    assert "SIGINT: ending" in "".join(server.lines)


def test_a_second_signal_while_a_model_is_loaded_ends_at_once(tmp_path, smollm2):
    server = Server(tmp_path, str(smollm2))
    engine = loading(server, smollm2)
    os.kill(engine[0], signal.SIGSTOP)  # so that it does not end when it is asked to
    server.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + 20
    while not any("a second signal ends at once" in line for line in server.lines):
        assert time.monotonic() < deadline
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(20) == 128 + signal.SIGTERM
    with contextlib.suppress(ProcessLookupError):  # where it was hung up on, stopped as it was
        os.kill(engine[0], signal.SIGCONT)
    server.close()
    deadline = time.monotonic() + 10
    while _is_alive(engine[0]):
        assert time.monotonic() < deadline
    assert not any("Traceback" in line for line in server.lines)


def test_a_signal_gives_up_the_load_that_a_request_waits_for(tmp_path, smollm2):
    file = tmp_path / "models.toml"
    file.write_text(f'[models.m]\nmodel = "{smollm2}"\n')
    with serving(tmp_path, "--models-file", str(file)) as server, ThreadPoolExecutor(1) as users:
        asked = users.submit(server.post, SHORT)
        engine = loading(server, smollm2)
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert asked.result().status_code == 503
        assert server.process.wait(20) == 0
        assert time.monotonic() - began < 8
        assert not [pid for pid in engine if _is_alive(pid)]
        assert not any("Traceback" in line for line in server.lines)


def test_what_has_not_ended_by_the_drain_timeout_gets_an_error(tmp_path, smollm2):
    options = ("--served-name", "m", "--context", "4096", "--drain-timeout", "0.5")
    with serving(tmp_path, str(smollm2), *options) as server:
        streams = [stream(server, {**STORY, "max_tokens": 4000, "ignore_eos": True}) for _ in range(2)]
        for chunks in streams:
            next(chunks)
        server.process.send_signal(signal.SIGTERM)
        for *_, last in streams:
            assert isinstance(last, dict)
            assert last["error"]["code"] == "unavailable"
        assert server.process.wait(20) == 0


def test_a_timeout_ends_a_stream_with_an_error(server):
    body = {**STORY, "max_tokens": 900, "ignore_eos": True, "timeout": 0.5}
    *_, last = stream(server, body)
    assert isinstance(last, dict)
    assert last["error"]["code"] == "timeout"
    answer = server.post(body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
