"""The OpenAI dialect on the wire: the unmodified `openai` client, and raw HTTP where the client is too polite."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncGenerator, Iterator
from urllib.parse import urlsplit

import httpx2 as httpx
import openai
import pytest

from pelton.errors import ContextLengthExceeded, Overloaded
from pelton.request import TextDelta, TextEvent
from pelton.server import answer

MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT = {"model": "scripted", "messages": MESSAGES}


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as each:
        yield each


def post(url: str, body: object, path: str = "/v1/chat/completions") -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(url + path, content=content, headers={"content-type": "application/json"})


def events(response: httpx.Response) -> list[str]:
    return [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: ")]


def test_chat(client, service):
    answer = client.chat.completions.create(
        model="scripted",
        messages=[
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {"role": "assistant", "content": "Yes?", "reasoning_content": "They greet."},
        ],
        temperature=0.5,
        top_p=0.9,
        seed=3,
        stop=["END"],
        max_completion_tokens=20,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        logit_bias={"5": -100},
        extra_body={"top_k": 4, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2, "stop_token_ids": [9],
                    "ignore_eos": True, "skip_special_tokens": False, "priority": -3, "timeout": 60,
                    "queue_timeout": 2.5, "cache_salt": "mine"},
        user="ada",
    )  # fmt: skip
    assert answer.choices[0].message.content == "Hello 🦙"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.object == "chat.completion"
    assert answer.system_fingerprint == "fp-test"
    assert answer.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8, "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }  # fmt: skip
    sampling = service.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.stop) == (0.5, 0.9, 3, ("END",))
    assert (sampling.max_tokens, sampling.presence_penalty, sampling.frequency_penalty) == (20, 0.1, 0.2)
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (4, 0.1, 1.1)
    assert (sampling.min_tokens, sampling.stop_token_ids, sampling.ignore_eos) == (2, (9,), True)
    assert sampling.logit_bias == {5: -100}
    assert sampling.skip_special_tokens is False
    request = service.requests[0]
    assert (request.priority, request.user, request.timeout, request.queue_timeout) == (-3, "ada", 60, 2.5)
    assert request.cache_salt == "mine"
    assert service.requests[0].messages[1].content == ({"type": "text", "text": "Hi"},)
    assert service.requests[0].messages[2].reasoning_content == "They greet."


def test_best_of_is_passed_on_and_cannot_be_streamed(url, service):
    assert post(url, {**CHAT, "n": 2, "best_of": 3}).status_code == 200
    assert (service.requests[0].sampling.n, service.requests[0].sampling.best_of) == (2, 3)
    assert post(url, {**CHAT, "n": 2, "best_of": 2, "stream": True}).status_code == 200
    response = post(url, {**CHAT, "best_of": 2, "stream": True})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "best_of")


def test_beam_search_is_passed_on_and_cannot_be_streamed(url, service):
    fields = {"use_beam_search": True, "beam_width": 4, "length_penalty": 0.5, "early_stopping": "never"}
    assert post(url, {**CHAT, **fields}).status_code == 200
    sampling = service.requests[0].sampling
    assert (sampling.use_beam_search, sampling.beam_width) == (True, 4)
    assert (sampling.length_penalty, sampling.early_stopping) == (0.5, "never")
    response = post(url, {**CHAT, **fields, "stream": True})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "stream")


def test_chat_stream(client):
    stream = client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello 🦙"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 3
    assert all(chunk.usage is None for chunk in chunks[:-1])


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (True, False)),
        ({"add_generation_prompt": False}, (False, False)),
        ({"continue_final_message": True}, (False, True)),
        ({"continue_final_message": True, "add_generation_prompt": True}, (True, True)),  # the template refuses it
    ],
)
def test_what_stands_at_the_prompts_end(url, service, fields, expected):
    post(url, {**CHAT, **fields})
    request = service.requests[0]
    assert (request.add_generation_prompt, request.continue_final_message) == expected


def test_without_include_usage_no_chunk_has_usage(url):
    lines = events(post(url, {**CHAT, "stream": True}))
    assert lines[-1] == "[DONE]"
    assert not any("usage" in json.loads(line) for line in lines[:-1])


def test_several_choices_keep_their_indices(client):
    answer = client.chat.completions.create(**CHAT, n=3)
    assert [c.index for c in answer.choices] == [0, 1, 2]
    assert answer.usage.completion_tokens == 9
    chunks = list(client.chat.completions.create(**CHAT, n=3, stream=True))
    for i in range(3):
        pieces = [c.choices[0].delta.content or "" for c in chunks if c.choices[0].index == i]
        assert "".join(pieces) == "Hello 🦙"


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs(client, stream):
    answer = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2, stream=stream)
    if stream:
        content = [t for c in answer if c.choices[0].logprobs for t in c.choices[0].logprobs.content]
    else:
        content = answer.choices[0].logprobs.content
    assert [t.token for t in content] == ["Hel", "lo", " 🦙"]
    assert content[2].bytes == list(" 🦙".encode())
    assert [top.token for top in content[0].top_logprobs] == ["Hel", "x"]


def test_completions(client, service):
    answer = client.completions.create(model="scripted", prompt="Once", logprobs=2)
    assert answer.choices[0].text == "Hello 🦙"
    assert service.requests[0].sampling.max_tokens == 16
    assert answer.choices[0].logprobs.text_offset == [0, 3, 5]
    assert answer.choices[0].logprobs.top_logprobs[0] == {"Hel": -0.1, "x": -3.0}


@pytest.mark.parametrize("stream", [False, True])
def test_completions_of_several_prompts_share_one_answer(client, service, stream):
    answer = client.completions.create(model="scripted", prompt=["a", "b"], n=2, stream=stream)
    choices = [c.choices[0] for c in answer] if stream else answer.choices
    texts = ["".join(c.text for c in choices if c.index == i) for i in range(4)]
    assert texts == ["Hello 🦙"] * 4
    assert [r.prompt for r in service.requests] == ["a", "b"]


def test_completions_of_ids(client, service):
    client.completions.create(model="scripted", prompt=[[1, 2], [3]])
    client.completions.create(model="scripted", prompt=[4, 5])
    long = list(range(5000))  # more ids than a request may have prompts
    client.completions.create(model="scripted", prompt=long)
    client.completions.create(model="scripted", prompt=[long])
    assert [r.prompt_ids for r in service.requests] == [(1, 2), (3,), (4, 5), tuple(long), tuple(long)]


def test_models(client):
    assert [m.id for m in client.models.list()] == ["scripted"]
    card = client.models.retrieve("scripted")
    assert (card.id, card.max_model_len, card.weight_bytes) == ("scripted", 99, 1000)
    with pytest.raises(openai.NotFoundError, match="there are: scripted"):
        client.models.retrieve("nobody")


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"{", 400, None),
        (b"[]", 400, None),
        (b"\xff\xfe", 400, None),
        (b'{"model": ' + b"[" * 40_000 + b"]" * 40_000 + b"}", 400, None),
        (b'{"ignored": ' + b'{"a":' * 10_000 + b"1" + b"}" * 10_000 + b', "model": "m", "messages": []}', 400, None),
        (b" " * 100_001, 413, None),
        ({"messages": MESSAGES}, 400, None),
        ({**CHAT, "model": "nobody"}, 404, "model"),
        ({**CHAT, "messages": "Hi"}, 400, "messages"),
        ({**CHAT, "messages": [{"content": "Hi"}]}, 400, "messages"),
        ({**CHAT, "temperature": "hot"}, 400, "temperature"),
        ({**CHAT, "max_tokens": 0}, 400, "max_tokens"),
        ({**CHAT, "top_logprobs": 3}, 400, "top_logprobs"),
        ({**CHAT, "logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
        ({**CHAT, "logit_bias": {"x": 1}}, 400, "logit_bias"),
        ({**CHAT, "logit_bias": {"1_0": 1}}, 400, "logit_bias"),
        ({**CHAT, "logit_bias": {" 5": 1}}, 400, "logit_bias"),
        ({**CHAT, "logit_bias": {"05": 1}}, 400, "logit_bias"),
        ({**CHAT, "logit_bias": {"9" * 5000: 1}}, 400, "logit_bias"),
        ({**CHAT, "stream_options": {"include_usage": True}}, 400, "stream_options"),
        ({**CHAT, "stream": True, "stream_options": {"continuous_usage_stats": True}}, 400, "stream_options"),
        ({**CHAT, "messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, 400, "messages"),
        ({**CHAT, "messages": [{"role": "assistant", "audio": {"id": "a"}}]}, 400, "messages"),
        ({**CHAT, "chat_template": "{{ messages }}"}, 400, "chat_template"),
        ({**CHAT, "response_format": {"type": "json_schema"}}, 400, "response_format"),
        ({**CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, 400, "response_format"),
        ({**CHAT, "response_format": {"type": "yaml"}}, 400, "response_format"),
        ({**CHAT, "response_format": "json_object"}, 400, "response_format"),
        ({**CHAT, "response_format": {"type": "json_schema", "schema": []}}, 400, "response_format"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_bad_input_is_answered_before_any_stream(url, body, status, param, stream):
    if stream and isinstance(body, dict) and "stream_options" not in body:
        body = {**body, "stream": True}
    response = post(url, body)
    assert response.status_code == status
    error = response.json()["error"]
    assert error["param"] == param
    assert set(error) == {"message", "type", "param", "code"}
    assert len(error["message"]) < 500
    assert httpx.get(url + "/health").json() == {"status": "ok"}


def test_prompts_cannot_be_mixed(url):
    for prompt in ([], ["a", 1], [[1], "a"]):
        response = post(url, {"model": "scripted", "prompt": prompt}, "/v1/completions")
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "prompt"


def test_what_asks_for_nothing_is_taken_and_unknown_fields_are_listed(url):
    body = {**CHAT, "tools": None, "response_format": {"type": "text"}, "metadata": {"a": "b"}, "colour": "red"}
    response = post(url, body)
    assert response.status_code == 200
    assert response.json()["ignored_params"] == ["colour", "metadata"]
    told = {"role": "user", "content": "Hi"}
    body = {**CHAT, "messages": [told, {**told, "name": "Ann", "colour": 1, "refusal": None}]}
    body |= {"stream": True, "stream_options": {"include_usage": True, "colour": 2}}
    first = json.loads(events(post(url, body))[0])
    assert first["ignored_params"] == ["messages[1].colour", "stream_options.colour"]
    many = post(url, {**CHAT, "messages": [{**told, "a": 1}] * 100}).json()["ignored_params"]
    assert (len(many), many[-1]) == (33, "... and 68 more")
    assert "ignored_params" not in post(url, CHAT).json()


SCHEMA = {"type": "object", "properties": {"z": {"type": "string"}, "a": {}}, "required": ["z"]}


@pytest.mark.parametrize(
    ("given", "schema"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_object", "schema": SCHEMA}, SCHEMA),
        ({"type": "json_schema", "schema": SCHEMA}, SCHEMA),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}, SCHEMA),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": True}}, True),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_every_spelling_of_a_schema_reaches_the_service_in_its_order(service, url, given, schema, path):
    body = CHAT if "chat" in path else {"model": "scripted", "prompt": "x"}
    assert post(url, {**body, "response_format": given}, path).status_code == 200
    grammar = service.requests[-1].grammar
    if schema is None:
        assert grammar is None
    else:
        assert grammar.kind == "json_schema"
        assert grammar.text == json.dumps(schema, separators=(",", ":"))


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_service_refuses_is_a_plain_error(service, client, url, stream):
    service.refuse = ContextLengthExceeded("the prompt has 900 tokens, the context holds 512", param="messages")
    with pytest.raises(openai.BadRequestError, match="900 tokens") as caught:
        client.chat.completions.create(**CHAT, stream=stream)
    assert caught.value.code == "context_length_exceeded"
    service.refuse = Overloaded("256 requests wait already", retry_after=3)
    response = post(url, {**CHAT, "stream": stream})
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    assert response.headers["content-type"] == "application/json"


def test_a_fault_in_mid_stream_is_one_error_event(service, url):
    service.fail_after = 2
    lines = events(post(url, {**CHAT, "stream": True}))
    assert json.loads(lines[-1])["error"]["message"] == "the engine broke"
    assert sum("error" in json.loads(line) for line in lines) == 1
    assert "[DONE]" not in lines
    assert not any(choice["finish_reason"] for line in lines[:-1] for choice in json.loads(line)["choices"])
    assert post(url, CHAT).status_code == 500


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_request(service, url, stream):
    service.hang_after = 1
    address = urlsplit(url)
    body = json.dumps({**CHAT, "stream": stream}).encode()
    with socket.create_connection((address.hostname, address.port)) as connection:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        deadline = time.monotonic() + 5
        while not service.num_open and time.monotonic() < deadline:
            time.sleep(0.01)
        assert service.num_open == 1
    while service.num_open and time.monotonic() < deadline:
        time.sleep(0.01)
    assert service.num_open == 0
    assert service.num_ended == 0


@pytest.mark.parametrize("refused", [True, False])
def test_requests_of_an_answer_that_does_not_begin_are_given_up(refused):
    kept, closed = [], []

    async def stream() -> AsyncGenerator[TextEvent, None]:
        try:
            yield TextDelta(choice=0, text="")
            yield TextDelta(choice=0, text="never read")
        finally:
            closed.append(True)

    async def accepted() -> AsyncGenerator[TextEvent, None]:
        kept.append(stream())  # so that forgetting it does not close it
        await anext(kept[0])
        return kept[0]

    async def late() -> AsyncGenerator[TextEvent, None]:
        await asyncio.sleep(0.01)
        if refused:
            raise Overloaded("no")
        await asyncio.sleep(3600)
        return stream()

    async def main() -> None:
        with pytest.raises(Overloaded if refused else TimeoutError):
            async with asyncio.timeout(0.05):
                await answer._start([accepted(), late()])
        assert closed == [True]

    asyncio.run(main())


def test_unknown_routes_and_methods(url):
    assert httpx.get(url + "/nothing").status_code == 404
    response = httpx.get(url + "/v1/chat/completions")
    assert response.status_code == 405
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_request_ids_are_honoured(url):
    assert httpx.get(url + "/health", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert len(httpx.get(url + "/health", headers={"x-request-id": "a b\tc"}).headers["x-request-id"]) == 24
