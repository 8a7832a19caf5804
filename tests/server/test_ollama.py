"""The Ollama dialect: answers, by the unmodified `ollama` client, and what of a request reaches the service."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator

import httpx2 as httpx
import ollama
import pytest

from pelton.errors import EngineDied, InsufficientMemory
from pelton.request import TextDelta, TextFinish, ToolCallBegin, ToolCallDelta, ToolCallEnd
from tests.server.scripted import ScriptedPool, ScriptedService, serving_pool

MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT = {"model": "scripted", "messages": MESSAGES}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
EVENTS = (
    TextDelta(choice=0, text="They ask.", kind="reasoning", token_ids=(7,)),
    TextDelta(choice=0, text="Let me see.", token_ids=(8, 9)),
    ToolCallBegin(choice=0, index=0, id="call_a", name="weather"),
    ToolCallDelta(choice=0, index=0, arguments='{"city": '),
    ToolCallDelta(choice=0, index=0, arguments='"Oslo"}'),
    ToolCallEnd(choice=0, index=0),
    ToolCallBegin(choice=0, index=1, id="call_b", name="weather"),
    ToolCallDelta(choice=0, index=1, arguments='{"ci'),
    ToolCallEnd(choice=0, index=1),
    TextFinish(choice=0, reason="tool_calls", warnings=("Look out.",)),
)


@pytest.fixture
def pool(service: ScriptedService) -> ScriptedPool:
    return ScriptedPool(service)


@pytest.fixture
def url(pool: ScriptedPool) -> Iterator[str]:
    with serving_pool(pool) as address:  # type: ignore[arg-type]
        yield address


@pytest.fixture
def client(url: str) -> Iterator[ollama.Client]:
    each = ollama.Client(host=url)
    yield each
    each.close()


def weather(city: str) -> str:
    """Tell the weather.

    Args:
      city: Where.
    """
    return city


def test_a_whole_chat(client, service):
    answer = client.chat(**CHAT)
    assert (answer.message.role, answer.message.content, answer.done, answer.done_reason) == (
        "assistant", "Hello 🦙", True, "stop",
    )  # fmt: skip
    assert (answer.prompt_eval_count, answer.eval_count) == (5, 3)
    assert answer.total_duration >= answer.load_duration + answer.prompt_eval_duration + answer.eval_duration > 0
    assert answer.created_at.endswith("Z")
    (request,) = service.requests
    assert [(each.role, each.content) for each in request.messages] == [("user", "Hi")]
    assert request.add_generation_prompt


def test_a_streamed_chat(client):
    *pieces, last = client.chat(**CHAT, stream=True)
    assert [piece.message.content for piece in pieces] == ["Hel", "lo", " 🦙"]
    assert not any(piece.done for piece in pieces)
    assert (last.done, last.message.content, last.done_reason, last.eval_count) == (True, "", "stop", 3)


def test_a_stream_is_lines_of_json_and_the_default(url):
    response = httpx.post(url + "/api/chat", json=CHAT)
    assert response.headers["content-type"] == "application/x-ndjson"
    assert [json.loads(line)["done"] for line in response.text.splitlines()] == [False, False, False, True]


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_and_tool_calls(client, service, stream):
    service.events = EVENTS
    found = client.chat(**CHAT, tools=[weather], think=True, stream=stream)
    messages = [piece.message for piece in found] if stream else [found.message]
    assert "".join(message.thinking or "" for message in messages) == "They ask."
    assert "".join(message.content for message in messages) == "Let me see."
    calls = [call.function for message in messages for call in message.tool_calls or ()]
    assert [(call.name, call.arguments) for call in calls] == [
        ("weather", {"city": "Oslo"}), ("weather", {"INVALID_JSON": '{"ci'}),
    ]  # fmt: skip
    (request,) = service.requests
    assert request.thinking is True
    (tool,) = request.tools
    assert (tool.name, tool.description, tool.parameters["required"]) == ("weather", "Tell the weather.", ["city"])


def test_what_tools_gave_goes_back(client, service):
    calls = [{"function": {"name": name, "arguments": {"city": "Oslo"}}} for name in ("weather", "time")]
    client.chat(
        model="scripted",
        messages=[
            *MESSAGES,
            {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": calls},
            {"role": "tool", "tool_name": "time", "content": "noon"},
            {"role": "tool", "tool_name": "weather", "content": "rain"},
        ],
    )
    _, said, time, rain = service.requests[0].messages
    assert (said.content, said.reasoning_content) == (None, "Hm.")
    ids = [call["id"] for call in said.tool_calls]
    assert [json.loads(call["function"]["arguments"]) for call in said.tool_calls] == [{"city": "Oslo"}] * 2
    assert [(each.tool_call_id, each.name) for each in (time, rain)] == [(ids[1], "time"), (ids[0], "weather")]


def test_an_answer_goes_on_with_the_assistants_words(client, service):
    client.chat(model="scripted", messages=[*MESSAGES, {"role": "assistant", "content": "Well,"}])
    assert service.requests[0].continue_final_message
    assert not service.requests[0].add_generation_prompt


def test_a_whole_generation(client, service):
    answer = client.generate("scripted", "Hi", system="Be brief.")
    assert (answer.response, answer.done, answer.done_reason) == ("Hello 🦙", True, "stop")
    assert answer.context == [*b"<system>Be brief.<user>Hi<assistant>", 7, 7, 7]
    assert [each.role for each in service.requests[0].messages] == ["system", "user"]


def test_a_streamed_generation(client):
    *pieces, last = client.generate("scripted", "Hi", stream=True)
    assert [piece.response for piece in pieces] == ["Hel", "lo", " 🦙"]
    assert last.done
    assert last.context[-3:] == [7, 7, 7]
    assert all(piece.context is None for piece in pieces)


def test_a_generation_goes_on_behind_its_context(client, service):
    first = client.generate("scripted", "Hi")
    client.generate("scripted", "And?", context=first.context)
    # Behind the answer: what the template writes between it and the next answer.
    assert service.requests[1].prompt_ids == (*first.context, *b"<user>And?<assistant>")


def test_options(client, service):
    client.chat(
        **CHAT,
        options={
            "num_predict": 9, "temperature": 0.1, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "typical_p": 0.9, "seed": 3,
            "repeat_penalty": 1.2, "repeat_last_n": -1, "presence_penalty": 0.3, "frequency_penalty": 0.4,
            "mirostat": 2, "mirostat_tau": 4.0, "mirostat_eta": 0.2, "stop": ["a", "b"],
        },
    )  # fmt: skip
    sampling = service.requests[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.top_p) == (9, 0.1, 5, 0.5)
    assert (sampling.min_p, sampling.typical_p, sampling.seed, sampling.stop) == (0.1, 0.9, 3, ("a", "b"))
    penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    assert penalties == (1.2, 0.3, 0.4)
    assert (sampling.mirostat_mode, sampling.mirostat_tau, sampling.mirostat_eta) == (2, 4.0, 0.2)


def test_options_that_are_not_given_are_ollamas(client, service):
    client.chat(**CHAT, options={"num_predict": -2, "seed": -1})
    request = service.requests[0]
    assert (request.sampling.temperature, request.sampling.top_k, request.sampling.top_p) == (0.8, 40, 0.9)
    assert (request.sampling.max_tokens, request.sampling.seed) == (None, None)
    assert {"temperature", "stop"} <= set(request.left_open)
    assert not {"max_tokens", "seed"} & set(request.left_open)


def test_what_changes_nothing_is_listed(url):
    options = {"num_gpu": 1, "colour": "red", "repeat_last_n": 64, "repeat_penalty": 1.1, "num_ctx": 4096}
    answer = httpx.post(url + "/api/chat", json={**CHAT, "stream": False, "truncate": True, "options": options}).json()
    assert answer["ignored_params"] == [
        "options.colour", "options.num_gpu", "options.repeat_last_n", "truncate",
    ]  # fmt: skip
    assert answer["warnings"] == [
        "options.num_ctx is 4096, and this model is loaded for 99 tokens; nothing was cut",
    ]  # fmt: skip
    strict = httpx.post(
        url + "/api/chat", json={**CHAT, "options": options}, headers={"x-pelton-strict-params": "true"}
    )
    assert strict.status_code == 400


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"options": {"temperature": "hot"}}, "options.temperature"),
        ({"options": {"mirostat": 1}}, "options.mirostat is 1"),
        ({"options": {"num_predict": -3}}, "the least is -2"),
        ({"options": {"num_ctx": 0}}, "num_ctx"),
        ({"format": "xml"}, "format is 'xml'"),
        ({"think": "very"}, "think is 'very'"),
        ({"keep_alive": "soon"}, "keep_alive"),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs"),
        ({"messages": [{"role": "user", "content": "", "images": ["aGk="]}]}, "this model reads text only"),
        ({"tools": [{"type": "web", "function": {"name": "a"}}]}, "tools[0] is of type 'web'"),
    ],
)
def test_what_is_refused(url, given, problem):
    response = httpx.post(url + "/api/chat", json={**CHAT, **given})
    assert response.status_code == 400
    assert problem in response.json()["error"]
    assert response.json().keys() == {"error"}


def test_a_template_in_gos_syntax_is_refused(client):
    with pytest.raises(ollama.ResponseError, match="Go's syntax") as caught:
        client.generate("scripted", "Hi", template="{{ .Prompt }}")
    assert caught.value.status_code == 400


def test_formats(client, service):
    client.chat(**CHAT, format="json")
    client.generate("scripted", "Hi", format=SCHEMA)
    plain, schema = (request.grammar for request in service.requests)
    assert json.loads(plain.text) == {"type": "object"}
    assert json.loads(schema.text) == SCHEMA


@pytest.mark.parametrize(
    ("think", "thinking", "effort"),
    [(None, None, None), (False, False, None), (True, True, None), ("low", True, "low")],
)
def test_thinking(client, service, think, thinking, effort):
    client.chat(**CHAT, think=think)
    assert (service.requests[0].thinking, service.requests[0].reasoning_effort) == (thinking, effort)


def test_logprobs(client):
    answer = client.chat(**CHAT, logprobs=True, top_logprobs=2)
    assert [(each.token, each.logprob) for each in answer.logprobs] == [("Hel", -0.1), ("lo", -0.1), (" 🦙", -0.1)]
    assert [each.token for each in answer.logprobs[0].top_logprobs] == ["Hel", "x"]


@pytest.mark.parametrize(
    ("given", "seconds"), [("5m", 300), ("1h30m", 5400), (0, 0), (-1, math.inf), ("-1m", math.inf), (2.5, 2.5)]
)
def test_keep_alive(client, pool, given, seconds):
    client.chat(**CHAT, keep_alive=given)
    assert pool.kept[0] == seconds


def test_without_a_prompt_the_model_is_loaded_or_unloaded(client, pool, service):
    for answer in (client.generate("scripted", keep_alive="5m"), client.chat("scripted", keep_alive="5m")):
        assert (answer.done, answer.done_reason) == (True, "load")
    assert pool.kept == [300, 300]
    assert client.generate("scripted", keep_alive=0).done_reason == "unload"
    assert pool.unloaded == ["scripted"]
    assert not service.requests


def test_errors_before_the_answer_have_a_status(client, service):
    with pytest.raises(ollama.ResponseError, match="there is no model 'other'") as caught:
        client.chat("other", MESSAGES)
    assert caught.value.status_code == 404
    service.refuse = InsufficientMemory("it does not fit")
    with pytest.raises(ollama.ResponseError, match="it does not fit") as caught:
        list(client.chat(**CHAT, stream=True))
    assert caught.value.status_code == 507


def test_an_error_in_the_middle_of_a_stream(client, service):
    service.fail_after = 2
    pieces = client.chat(**CHAT, stream=True)
    assert [next(pieces).message.content for _ in range(2)] == ["Hel", "lo"]
    with pytest.raises(ollama.ResponseError, match="the engine broke"):
        next(pieces)


def test_an_engine_that_died(client, service):
    service.refuse = EngineDied("the engine has died")
    with pytest.raises(ollama.ResponseError) as caught:
        client.generate("scripted", "Hi")
    assert caught.value.status_code == 503


def test_what_cannot_be_done_says_so(client, url):
    with pytest.raises(ollama.ResponseError, match="cannot be pushed") as caught:
        client.push("scripted")
    assert caught.value.status_code == 404
    assert httpx.get(url + "/api/version").json()["version"].count(".") == 2


def test_what_is_loaded(client):
    (model,) = client.ps().models
    assert (model.name, model.model, model.details.family) == ("scripted:latest", "scripted:latest", "llama")
    assert model.details.parameter_size == "1.5M"
    assert model.expires_at.year == 9999


def test_the_asynchronous_client(url):
    async def ask() -> None:
        client = ollama.AsyncClient(host=url)
        assert (await client.chat(**CHAT)).message.content == "Hello 🦙"
        pieces = [piece.response async for piece in await client.generate("scripted", "Hi", stream=True)]
        assert "".join(pieces) == "Hello 🦙"
        await client.close()

    asyncio.run(ask())


def test_raw_prompts_and_suffixes_are_no_chats(client, service):
    assert client.generate("scripted", "<a>Hi", raw=True).context is None
    client.generate("scripted", "def f(", suffix="return 1")
    raw, infill = service.requests
    assert raw.prompt_ids == (256, *b"<a>Hi")
    assert (infill.prompt, infill.suffix) == ("def f(", "return 1")
    with pytest.raises(ollama.ResponseError, match="raw and system exclude each other"):
        client.generate("scripted", "Hi", raw=True, system="Be brief.")
