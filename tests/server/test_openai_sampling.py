"""Sampling parameters beyond OpenAI's own, and prompts in answers, on the wire through the `openai` client."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass

import openai
import pytest

from pelton.request import ProcessorCall, Request, TextEvent, TextPrompt, TokenText
from tests.server.scripted import ScriptedService, serving

MESSAGES = [{"role": "user", "content": "Hi"}]
FIELDS = {
    "top_k": 5,
    "typical_p": 0.9,
    "top_n_sigma": 1.5,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.2,
    "mirostat_mode": 2,
    "mirostat_tau": 4.0,
    "mirostat_eta": 0.2,
    "dry_multiplier": 0.8,
    "dry_base": 1.5,
    "dry_allowed_length": 3,
    "dry_penalty_last_n": 64,
    "dry_sequence_breakers": ["\n", "."],
    "allowed_token_ids": [1, 2, 3],
    "bad_words": ["very", "bad words"],
    "logits_processors": ["plain", {"name": "mine", "args": {"a": [1, None]}}],
    "prompt_logprobs": 2,
}
SCORED = TextPrompt(
    text="Good day",
    texts=("Good", " day"),
    tokens=(
        TokenText(
            id=8, text=" day", bytes=b" day", logprob=-2.0, rank=7,
            top=(TokenText(id=4, text=" bye", bytes=b" bye", logprob=-0.5, rank=1),
                 TokenText(id=5, text=" bye", bytes=b" bye", logprob=-0.7, rank=2)),
        ),
    ),
)  # fmt: skip


@dataclass
class EchoingService(ScriptedService):
    """Tells of a prompt first."""

    async def _events(self, request: Request) -> AsyncGenerator[TextEvent, None]:
        yield SCORED
        async for event in super()._events(request):
            yield event


@pytest.fixture
def service() -> EchoingService:
    return EchoingService()


@pytest.fixture
def client(service: EchoingService) -> Iterator[openai.OpenAI]:
    with serving(service) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as each:
        yield each


@pytest.mark.parametrize("is_chat", [True, False])
def test_fields_reach_the_engine_and_none_is_ignored(client, service, is_chat):
    if is_chat:
        answer = client.chat.completions.create(model="scripted", messages=MESSAGES, extra_body=FIELDS)
    else:
        answer = client.completions.create(model="scripted", prompt="Hi", extra_body=FIELDS)
    assert not hasattr(answer, "ignored_params")
    sampling = service.requests[0].sampling
    for name, value in FIELDS.items():
        if name != "logits_processors":
            assert getattr(sampling, name) == (tuple(value) if isinstance(value, list) else value), name
    assert sampling.logits_processors == ("plain", ProcessorCall(name="mine", args={"a": [1, None]}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mirostat_mode", 1),
        ("bad_words", "one"),
        ("allowed_token_ids", [1.5]),
        ("dry_sequence_breakers", [1]),
        ("logits_processors", [{"name": "mine", "arg": 1}]),
        ("logits_processors", "mine"),
        ("xtc_probability", "often"),
        ("prompt_logprobs", True),
        ("echo", 1),
    ],
)
def test_wrong_types_are_named(client, service, field, value):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="scripted", prompt="Hi", extra_body={field: value})
    assert caught.value.body["param"] == field
    assert service.requests == []


def test_echo_comes_before_the_answer(client, service):
    asked = {"model": "scripted", "prompt": "Good day", "echo": True, "logprobs": 2, "max_tokens": 3, "n": 2}
    for choice in client.completions.create(**asked).choices:
        assert choice.text == "Good dayHello 🦙"
        assert choice.logprobs.tokens == ["Good", " day", "Hel", "lo", " 🦙"]
        assert choice.logprobs.token_logprobs == [None, -2.0, -0.1, -0.1, -0.1]
        assert choice.logprobs.top_logprobs[:2] == [None, {" bye": -0.5, " day": -2.0}]
        assert choice.logprobs.text_offset == [0, 4, 8, 11, 13]
    assert service.requests[0].echo
    assert service.requests[0].sampling.prompt_logprobs == 2
    chunks = [c.choices[0] for c in client.completions.create(**asked, stream=True) if c.choices]
    for index in range(2):
        mine = [chunk for chunk in chunks if chunk.index == index]
        assert mine[0].text == "Good day"
        assert "".join(chunk.text for chunk in mine) == "Good dayHello 🦙"
        assert [o for chunk in mine if chunk.logprobs for o in chunk.logprobs.text_offset] == [0, 4, 8, 11, 13]
    plain = client.completions.create(model="scripted", prompt="Good day", echo=True)
    assert (plain.choices[0].text, plain.choices[0].logprobs) == ("Good dayHello 🦙", None)
    assert client.completions.create(model="scripted", prompt="Good day").choices[0].text == "Hello 🦙"


def test_prompt_logprobs_are_by_token_id(client):
    expected = [
        None,
        {
            "8": {"logprob": -2.0, "rank": 7, "decoded_token": " day"},
            "4": {"logprob": -0.5, "rank": 1, "decoded_token": " bye"},
        },
    ]
    asked = {"model": "scripted", "extra_body": {"prompt_logprobs": 1}}
    completion = client.completions.create(prompt="Hi", n=2, **asked)
    assert [choice.prompt_logprobs for choice in completion.choices] == [expected] * 2
    chat = client.chat.completions.create(messages=MESSAGES, **asked)
    assert chat.prompt_logprobs == expected
    assert not hasattr(client.chat.completions.create(messages=MESSAGES, model="scripted"), "prompt_logprobs")
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs"):
        client.chat.completions.create(messages=MESSAGES, stream=True, **asked)


def test_a_chat_needs_an_answer(client):
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.chat.completions.create(model="scripted", messages=MESSAGES, max_tokens=0)
