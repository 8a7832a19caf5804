"""Dialects other than OpenAI's over a real model: what is counted, cached and kept of a prompt, and that all of them
ask the model the same."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import anthropic
import httpx2 as httpx
import pytest

from tests.e2e.pelton_process import Server, serving

RULES = " ".join(f"Rule {i}: answer question number {i} briefly, in plain words, and politely." for i in range(30))
CHAT = {
    "model": "m",
    "max_tokens": 8,
    "system": [{"type": "text", "text": RULES, "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "extra_body": {"temperature": 0},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory, smollm2) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("home")
    with serving(home, str(smollm2), "--served-name", "m", "--context", "1024", "--threads", "2") as each:
        yield each


def num_input(usage: anthropic.types.Usage) -> int:
    return usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens


def test_a_prompt_is_counted_kept_and_read(server):
    with anthropic.Anthropic(base_url=server.url, api_key="none") as client:
        prompt = {name: CHAT[name] for name in ("model", "system", "messages")}
        counted = client.messages.count_tokens(**prompt).input_tokens
        first = client.messages.create(**CHAT)
        assert num_input(first.usage) == counted
        kept = first.usage.cache_creation.ephemeral_1h_input_tokens
        assert counted > kept == first.usage.cache_creation_input_tokens > 500
        assert first.usage.cache_read_input_tokens == 0
        deadline = time.monotonic() + 30
        while not (pins := httpx.get(f"{server.url}/v1/prefix_cache/pins").json()["data"]):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert [pin["num_tokens"] for pin in pins] == [kept // 32 * 32]
        assert pins[0]["expires_at"] - pins[0]["created_at"] == pytest.approx(3600)
        other = {**CHAT, "messages": [{"role": "user", "content": "And of Spain?"}]}
        with client.messages.stream(**other) as stream:
            second = stream.get_final_message()
        assert second.usage.cache_creation_input_tokens == 0
        assert second.usage.cache_read_input_tokens >= kept
        with client.messages.stream(**CHAT) as stream:
            again = stream.get_final_message()
        assert again.content[0].text == first.content[0].text
        assert num_input(again.usage) == counted
        assert again.stop_reason == first.stop_reason


def test_llama_cpps_steps_give_the_chat(server):
    chat = {"messages": [{"role": "user", "content": "What is 2+2?"}], "temperature": 0, "max_tokens": 12}
    whole = server.post({"model": "m", **chat}).json()
    prompt = httpx.post(f"{server.url}/apply-template", json={"messages": chat["messages"]}).json()["prompt"]
    tokens = httpx.post(f"{server.url}/tokenize", json={"content": prompt, "add_special": True}).json()["tokens"]
    assert len(tokens) == whole["usage"]["prompt_tokens"]
    assert httpx.post(f"{server.url}/detokenize", json={"tokens": tokens}).json()["content"] == prompt
    for given in (prompt, tokens):
        body = {"prompt": given, "temperature": 0, "n_predict": 12, "n_probs": 1}
        answer = httpx.post(f"{server.url}/completion", json=body, timeout=60).json()
        assert answer["content"] == whole["choices"][0]["message"]["content"]
        assert answer["tokens_evaluated"] == len(tokens)
        assert len(answer["completion_probabilities"]) == answer["tokens_predicted"]
    nothing = httpx.post(f"{server.url}/completion", json={"prompt": "Once", "n_predict": 0}, timeout=60)
    assert (nothing.status_code, nothing.json()["content"]) == (200, "")
    props = httpx.get(f"{server.url}/props").json()
    assert (props["model_alias"], props["default_generation_settings"]["n_ctx"]) == ("m", 1024)
    assert "<|im_start|>" in props["chat_template"]


def test_text_generation_inference_gives_the_same(server):
    asked = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 6, "decoder_input_details": True}}
    whole = httpx.post(f"{server.url}/generate", json=asked, timeout=60).json()
    body = {"prompt": asked["inputs"], "temperature": 0, "n_predict": 6}
    other = httpx.post(f"{server.url}/completion", json=body, timeout=60).json()
    assert whole["generated_text"] == other["content"]
    prefill = whole["details"]["prefill"]
    assert len(prefill) == other["tokens_evaluated"]
    assert prefill[0]["logprob"] is None
    assert all(each["logprob"] < 0 for each in prefill[1:])
    asked["parameters"] = {"max_new_tokens": 6}
    text = httpx.post(f"{server.url}/generate_stream", json=asked, timeout=60).text
    last = json.loads(text.strip().split("\n\n")[-1].removeprefix("data: "))
    assert last["generated_text"] == other["content"]
    assert last["details"]["input_length"] == len(prefill)
