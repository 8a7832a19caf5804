"""Logprobs of prompts on the real default model: the same bits as those of an answer, whatever the cache holds."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from pelton import LLM, SamplingParams
from tests.e2e.pelton_process import Server, serving

TEXT = "The capital of France is Paris, and the capital of Italy is Rome."


@pytest.fixture(scope="module")
def server(tmp_path_factory, smollm2) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("home")
    with serving(home, str(smollm2), "--served-name", "m", "--context", "1024", "--threads", "2") as each:
        yield each


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")


def test_a_text_is_scored_with_the_bits_of_its_answer(smollm2) -> None:
    with LLM(str(smollm2), context=1024, in_process=True) as llm:
        [told] = llm.generate(TEXT, SamplingParams(temperature=0, max_tokens=12, logprobs=3))
        [plain] = llm.generate(TEXT, SamplingParams(max_tokens=0, prompt_logprobs=0))
        ids = [plain.prompt_logprobs[1].id]
        assert plain.prompt_logprobs[0] is None
        prompt = llm._service.tokenizer.encode(TEXT, add_special=True)
        assert [each.id for each in plain.prompt_logprobs[1:]] == prompt[1:]
        assert ids == prompt[1:2]
        assert (plain.text, plain.usage.completion_tokens, plain.finish_reason) == ("", 0, "length")
        [scored] = llm.generate(
            [*prompt, *told.token_ids], SamplingParams(max_tokens=0, prompt_logprobs=3, temperature=0)
        )
        assert scored.usage.cached_tokens == 0
        tail = scored.prompt_logprobs[len(prompt) :]
        assert [(each.id, each.logprob) for each in tail] == [(each.id, each.logprob) for each in told.logprobs]
        assert [[(top.id, top.logprob) for top in each.top] for each in tail] == [
            [(top.id, top.logprob) for top in each.top] for each in told.logprobs
        ]
        assert [each.rank for each in tail] == [1] * 12


def test_echo_scores_text_as_lm_eval_asks_for_it(server, client) -> None:
    """The requests that lm-eval's `local-completions` makes, and what it reads of the answers."""
    prompt = server.post({"model": "m", "prompt": TEXT, "max_tokens": 1}, "/v1/completions").json()
    assert prompt["usage"]["prompt_tokens"] > 5
    with_one = client.completions.create(
        model="m", prompt=TEXT, max_tokens=1, echo=True, logprobs=1, temperature=0, seed=1234
    )
    without = client.completions.create(model="m", prompt=TEXT, max_tokens=0, echo=True, logprobs=1, temperature=0)
    assert without.choices[0].text == TEXT
    assert with_one.choices[0].text.startswith(TEXT)
    a, b = with_one.choices[0].logprobs, without.choices[0].logprobs
    assert a.tokens[:-1] == b.tokens
    assert a.token_logprobs[:-1] == b.token_logprobs
    assert a.top_logprobs[:-1] == b.top_logprobs
    assert a.text_offset[:-1] == b.text_offset
    assert b.token_logprobs[0] is None
    assert b.top_logprobs[0] is None
    assert "".join(b.tokens) == TEXT
    assert [TEXT[i:].startswith(token) for i, token in zip(b.text_offset, b.tokens, strict=True)] == [True] * len(
        b.tokens
    )
    likeliest = 0
    for token, chosen, top in zip(b.tokens[1:], b.token_logprobs[1:], b.top_logprobs[1:], strict=True):
        assert top[token] == chosen <= max(top.values())  # lm-eval's "greedy" is that it is equal
        assert len(top) == (1 if chosen == max(top.values()) else 2)
        likeliest += len(top) == 1
    assert 0 < likeliest < len(b.tokens) - 1
    assert without.usage.completion_tokens == 0
    assert without.choices[0].finish_reason == "length"
    several = client.completions.create(
        model="m", prompt=[TEXT, TEXT + " And"], max_tokens=0, echo=True, logprobs=1, n=2, extra_body={"seed": 3}
    )
    assert [choice.logprobs.token_logprobs[: len(b.tokens)] for choice in several.choices] == [b.token_logprobs] * 4


def test_prompt_logprobs_on_both_routes(server, client) -> None:
    completion = client.completions.create(model="m", prompt=TEXT, max_tokens=2, extra_body={"prompt_logprobs": 2})
    first, *positions = completion.choices[0].prompt_logprobs
    assert first is None
    assert len(positions) + 1 == completion.usage.prompt_tokens
    for position in positions:
        ranks = sorted(each["rank"] for each in position.values())
        assert ranks[:2] == [1, 2]
        assert len(ranks) == 2 + (ranks[-1] > 2)
        assert all(each["logprob"] <= 0 and isinstance(each["decoded_token"], str) for each in position.values())
    echoed = client.completions.create(model="m", prompt=TEXT, max_tokens=0, echo=True, logprobs=0)
    chosen = echoed.choices[0].logprobs.token_logprobs[1:]
    assert all(any(each["logprob"] == value for each in p.values()) for p, value in zip(positions, chosen, strict=True))
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "prompt_logprobs": 0}
    chat = server.post(body).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert server.post(body).json()["prompt_logprobs"] == chat["prompt_logprobs"]
    for wrong in ({"max_tokens": 0}, {"prompt_logprobs": 21}, {"prompt_logprobs": -1}):
        answer = server.post({**body, **wrong})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(wrong)))
    answer = server.post({**body, "stream": True})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt_logprobs")
    answer = server.post({"model": "m", "prompt": "Hi", "max_tokens": 0}, "/v1/completions")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")


def test_an_echo_is_streamed_before_its_answer(client) -> None:
    asked = {"model": "m", "prompt": TEXT, "max_tokens": 4, "echo": True, "logprobs": 1, "temperature": 0}
    whole = client.completions.create(**asked).choices[0]
    chunks = [chunk.choices[0] for chunk in client.completions.create(**asked, stream=True) if chunk.choices]
    assert chunks[0].text == TEXT
    assert "".join(chunk.text for chunk in chunks) == whole.text
    parts = [chunk.logprobs for chunk in chunks if chunk.logprobs]
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        assert [each for part in parts for each in getattr(part, name)] == getattr(whole.logprobs, name)
