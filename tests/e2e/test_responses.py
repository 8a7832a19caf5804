"""/v1/responses over an engine, in processes that are killed: threads, what is cached of them, what survives."""

from __future__ import annotations

import time
from pathlib import Path

import openai

from tests.e2e import tiny_model
from tests.e2e.pelton_process import Server, serving

TEXT = "The quick brown fox jumps over the lazy dog. " * 4
ASK = {"model": "m", "input": TEXT, "temperature": 0, "max_output_tokens": 12, "extra_body": {"ignore_eos": True}}


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_threads_and_background_runs_outlive_a_killed_server(tmp_path: Path):
    model = tiny_model.write(tmp_path, "llama")
    options = (str(model), "--served-name", "m", "--threads", "1")
    with serving(tmp_path, *options) as server, client_of(server) as client:
        first = client.responses.create(**ASK, instructions="Be brief.")
        assert (first.status, first.usage.output_tokens) == ("incomplete", 12)
        with client.responses.stream(**ASK, instructions="Be brief.") as stream:
            (*_, last) = stream
        assert last.response.output_text == first.output_text
        second = client.responses.create(
            **{**ASK, "input": "More."}, instructions="Be brief.", previous_response_id=first.id
        )
        assert second.usage.input_tokens > first.usage.input_tokens
        assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens
        said = [
            {"role": "user", "content": TEXT},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "More."},
        ]
        whole = client.responses.create(**{**ASK, "input": said}, instructions="Be brief.")
        assert whole.output_text == second.output_text
        assert whole.usage.input_tokens == second.usage.input_tokens
        counted = client.responses.input_tokens.count(model="m", input=said, instructions="Be brief.")
        assert counted.input_tokens == second.usage.input_tokens
        running = client.responses.create(**{**ASK, "max_output_tokens": 800}, background=True)
        deadline = time.monotonic() + 20
        while not client.responses.retrieve(running.id).output_text:
            assert time.monotonic() < deadline
        server.process.kill()
    with serving(tmp_path, *options) as server, client_of(server) as client:
        failed = client.responses.retrieve(running.id)
        assert failed.status == "failed"
        assert "the server ended" in failed.error.message
        assert client.responses.retrieve(second.id) == second
        again = client.responses.create(
            **{**ASK, "input": "More."}, instructions="Be brief.", previous_response_id=first.id
        )
        assert again.output_text == second.output_text
        assert [each.name for each in tmp_path.glob("*.alive")] == []
