"""A batch over a real engine, with the unmodified `openai` client: stopped and killed in the middle, and no different
for that."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest
from openai.types import Batch

from tests.e2e import tiny_model
from tests.e2e.pelton_process import Server, serving

CHAT = "/v1/chat/completions"
NUM_LINES, NUM_TOKENS = 24, 30


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_model.write(tmp_path_factory.mktemp("model"), "llama")


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def chat(number: int) -> dict:
    """Every second one is greedy, the others have a seed."""
    sampling = {"temperature": 0} if number % 2 else {"temperature": 1.0, "seed": number}
    messages = [{"role": "user", "content": f"Say something about {number}."}]
    return {
        "model": "m",
        "messages": messages,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "logprobs": True,
        **sampling,
    }


def lines() -> Iterator[bytes]:
    for number in range(NUM_LINES):
        yield json.dumps({"custom_id": str(number), "method": "POST", "url": CHAT, "body": chat(number)}).encode()


def wait(client: openai.OpenAI, id: str, until: Callable[[Batch], bool]) -> Batch:
    deadline = time.monotonic() + 60
    while not until(batch := client.batches.retrieve(id)):
        assert time.monotonic() < deadline, batch
        time.sleep(0.01)
    return batch


def answers(client: openai.OpenAI, id: str) -> dict[str, str]:
    """Each request's choices."""
    batch = wait(client, id, lambda batch: batch.status == "completed")
    assert batch.request_counts.model_dump() == {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}
    assert batch.usage.output_tokens == NUM_TOKENS * NUM_LINES
    found = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    assert len(found) == NUM_LINES
    return {each["custom_id"]: json.dumps(each["response"]["body"]["choices"]) for each in found}


def test_a_batch_that_is_interrupted_ends_as_one_that_was_not(tmp_path, model):
    args = (str(model), "--served-name", "m", "--context", "256", "--threads", "1", "--max-sequences", "3")
    with serving(tmp_path, *args) as server, client_of(server) as client:
        file = client.files.create(file=b"\n".join(lines()), purpose="batch")
        asked = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
        batch = client.batches.create(**asked)
        wait(client, batch.id, lambda batch: batch.request_counts.completed >= 3)
        mine = server.post(chat(3)).json()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0
    with serving(tmp_path, *args) as server, client_of(server) as client:
        told = wait(client, batch.id, lambda batch: batch.request_counts.completed >= 9)
        server.process.kill()
        server.process.wait()
    assert told.status == "in_progress"
    assert told.request_counts.completed < NUM_LINES
    with serving(tmp_path, *args) as server, client_of(server) as client:
        disturbed = answers(client, batch.id)
        undisturbed = answers(client, client.batches.create(**asked).id)
        assert disturbed == undisturbed
        assert json.loads(disturbed["3"]) == mine["choices"]
