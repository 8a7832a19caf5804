"""OpenAI's /v1/responses on the wire: the unmodified `openai` client, and raw HTTP where the client is too polite."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import openai
import pydantic
import pytest

from pelton.errors import ContextLengthExceeded
from pelton.request import TextDelta, TextFinish, ToolCallBegin, ToolCallDelta, ToolCallEnd
from tests.server.scripted import ScriptedService, serving, token

ASK = {"model": "scripted", "input": "Hi"}
WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}
CALLS = (
    TextDelta(choice=0, text="Let me", kind="reasoning"),
    TextDelta(choice=0, text=" see.", kind="reasoning"),
    TextDelta(choice=0, text="Looking."),
    ToolCallBegin(choice=0, index=0, id="call_1", name="weather"),
    ToolCallDelta(choice=0, index=0, arguments='{"city":'),
    ToolCallDelta(choice=0, index=0, arguments=' "Oslo"}'),
    ToolCallEnd(choice=0, index=0),
    TextFinish(choice=0, reason="tool_calls"),
)


@pytest.fixture
def url(service: ScriptedService, store: Path) -> Iterator[str]:
    with serving(service, store=str(store)) as address:
        yield address


def refused(url: str, **fields: object) -> dict[str, object]:
    response = httpx.post(f"{url}/v1/responses", json={**ASK, **fields})
    assert response.status_code == 400, response.text
    return response.json()["error"]


def test_a_response_and_what_it_is_made_of(client, service):
    made = client.responses.create(
        model="scripted",
        instructions="Be kind.",
        input=[
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": [{"type": "output_text", "text": "Yes?", "annotations": []}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Go"}]},
        ],
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=20,
        metadata={"of": "a test"},
        reasoning={"effort": "low"},
        service_tier="flex",
        safety_identifier="ada",
        prompt_cache_key="mine",
        extra_body={"seed": 3, "top_k": 4, "stop": ["END"], "timeout": 60, "cache_salt": "salt"},
    )
    assert (made.status, made.output_text, made.object) == ("completed", "Hello 🦙", "response")
    assert (made.instructions, made.metadata, made.service_tier) == ("Be kind.", {"of": "a test"}, "flex")
    assert (made.usage.input_tokens, made.usage.input_tokens_details.cached_tokens) == (5, 2)
    assert (made.usage.output_tokens, made.usage.total_tokens) == (3, 8)
    assert made.output[0].status == "completed"
    assert "ignored_params" not in made.model_extra
    request = service.requests[0]
    assert [(each.role, each.content) for each in request.messages] == [
        ("system", "Be kind."), ("user", "Hi"), ("assistant", "Yes?"), ("user", "Go"),
    ]  # fmt: skip
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens, sampling.seed) == (0.5, 0.9, 20, 3)
    assert (sampling.top_k, sampling.stop, request.timeout, request.cache_salt) == (4, ("END",), 60, "salt")
    assert (request.priority, request.user, request.reasoning_effort) == (100, "ada", "low")
    assert client.responses.retrieve(made.id) == made
    items = list(client.responses.input_items.list(made.id, order="asc", limit=2))
    assert [(each.role, each.content[0].text) for each in items] == [
        ("user", "Hi"),
        ("assistant", "Yes?"),
        ("user", "Go"),
    ]
    assert len({each.id for each in items}) == 3
    page = client.responses.input_items.list(made.id, limit=1, after=items[2].id)
    assert ([each.id for each in page.data], page.has_more) == ([items[1].id], True)


def test_stream_of_text(client):
    events = list(client.responses.create(**ASK, stream=True))
    assert [each.type for each in events] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.delta", "response.output_text.delta", "response.output_text.delta",
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    assert [each.sequence_number for each in events] == list(range(len(events)))
    assert (events[0].response.status, events[0].response.output) == ("in_progress", [])
    assert "".join(each.delta for each in events if each.type == "response.output_text.delta") == "Hello 🦙"
    last = events[-1].response
    assert events[-2].item == last.output[0]
    assert client.responses.retrieve(last.id) == last


@pytest.mark.parametrize("is_stream", [False, True])
def test_thoughts_and_calls(client, service, is_stream):
    service.events = CALLS
    fields = {"model": "scripted", "input": "Weather?", "tools": [WEATHER], "tool_choice": "required"}
    if is_stream:
        with client.responses.stream(**fields) as stream:
            events = list(stream)
            made = stream.get_final_response()
        types = [each.type for each in events]
        assert types.count("response.output_item.added") == types.count("response.output_item.done") == 3
        assert types.count("response.reasoning_text.delta") == 2
        assert [each.snapshot for each in events if each.type == "response.function_call_arguments.delta"][-1] == (
            '{"city": "Oslo"}'
        )
    else:
        made = client.responses.create(**fields)
    assert [each.type for each in made.output] == ["reasoning", "message", "function_call"]
    thought, said, call = made.output
    assert (thought.content[0].text, said.content[0].text) == ("Let me see.", "Looking.")
    assert (call.call_id, call.name, call.arguments, call.status) == (
        "call_1",
        "weather",
        '{"city": "Oslo"}',
        "completed",
    )
    request = service.requests[-1]
    assert (request.tools[0].name, request.tools[0].strict, request.tool_choice.mode) == ("weather", True, "required")
    service.events = ()
    gave = [{"type": "function_call_output", "call_id": call.call_id, "output": "12 degrees"}]
    client.responses.create(model="scripted", input=gave, previous_response_id=made.id)
    user, turn, result = service.requests[-1].messages
    assert (user.role, turn.role, turn.content, turn.reasoning_content) == (
        "user",
        "assistant",
        "Looking.",
        "Let me see.",
    )
    assert turn.tool_calls[0]["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
    assert (result.role, result.tool_call_id, result.content) == ("tool", "call_1", "12 degrees")


def test_choices_of_tools(url, service):
    for given, mode, names in (
        ("none", "none", ()),
        ({"type": "function", "name": "weather"}, "required", ("weather",)),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]},
            "auto",
            ("weather",),
        ),
    ):
        body = {**ASK, "tools": [WEATHER], "tool_choice": given, "parallel_tool_calls": False, "store": False}
        made = httpx.post(f"{url}/v1/responses", json=body).json()
        assert made["tool_choice"] == given or made["tool_choice"]["type"] == given["type"]
        assert (service.requests[-1].tool_choice.mode, service.requests[-1].tool_choice.names) == (mode, names)
        assert service.requests[-1].parallel_tool_calls is made["parallel_tool_calls"] is False


def test_cut_answers_are_incomplete(client, service):
    service.events = (*CALLS[3:5], CALLS[6], TextFinish(choice=0, reason="length"))
    made = client.responses.create(**ASK, max_output_tokens=4)
    assert (made.status, made.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert made.output[0].status == "incomplete"
    events = list(client.responses.create(**ASK, stream=True))
    assert events[-1].type == "response.incomplete"
    assert events[-2].item.status == "incomplete"
    service.events = ()
    client.responses.create(model="scripted", input="Go on", previous_response_id=made.id)
    cut = service.requests[-1].messages[1].tool_calls[0]["function"]["arguments"]
    assert json.loads(cut) == {"INVALID_JSON": '{"city":'}


def test_an_answer_without_a_token_is_an_empty_message(client, service):
    service.events = (TextFinish(choice=0, reason="stop"),)
    assert client.responses.create(**ASK).output[0].content[0].text == ""
    with client.responses.stream(**ASK) as stream:
        assert stream.get_final_response().output[0].content[0].text == ""


class City(pydantic.BaseModel):
    name: str


def test_structured_answers_are_parsed(client, service):
    service.events = (TextDelta(choice=0, text='{"name": "Oslo"}'), TextFinish(choice=0, reason="stop"))
    made = client.responses.parse(**ASK, text_format=City)
    assert made.output_parsed == City(name="Oslo")
    grammar = service.requests[-1].grammar
    assert (grammar.kind, grammar.is_strict, grammar.param) == ("json_schema", True, "text.format.schema")
    assert made.text.format.name == "City"
    with client.responses.stream(**ASK, text_format=City) as stream:
        assert stream.get_final_response().output_parsed == City(name="Oslo")
    client.responses.create(**ASK, text={"format": {"type": "json_object"}})
    assert service.requests[-1].grammar.text == '{"type":"object"}'


@pytest.mark.parametrize("is_stream", [False, True])
def test_logprobs(client, service, is_stream):
    fields = {**ASK, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    if is_stream:
        events = list(client.responses.create(**fields, stream=True))
        told = [each for event in events if event.type == "response.output_text.delta" for each in event.logprobs]
        assert [each.token for each in told] == ["Hel", "lo", " 🦙"]
        done = next(event for event in events if event.type == "response.output_text.done")
        assert [each.token for each in done.logprobs] == ["Hel", "lo", " 🦙"]
        made = events[-1].response
    else:
        made = client.responses.create(**fields)
    logprobs = made.output[0].content[0].logprobs
    assert [(each.token, len(each.top_logprobs)) for each in logprobs] == [("Hel", 2), ("lo", 2), (" 🦙", 2)]
    service.events = (
        TextDelta(choice=0, text="", tokens=(token("<"),)),
        ToolCallBegin(choice=0, index=0, id="call_1", name="weather"),
        TextDelta(choice=0, text="", tokens=(token("{}"),)),
        ToolCallEnd(choice=0, index=0),
        TextDelta(choice=0, text="Hi", tokens=(token("Hi"),)),
        TextFinish(choice=0, reason="stop"),
    )
    said = client.responses.create(**fields).output[1].content[0]
    assert [each.token for each in said.logprobs] == ["Hi"]


def test_what_changes_nothing_is_listed(url, client):
    made = client.responses.create(
        **ASK,
        text={"verbosity": "low"},
        reasoning={"summary": "auto"},
        truncation="auto",
        include=["reasoning.encrypted_content"],
        service_tier="scale",
        extra_body={"colour": "red"},
    )
    assert made.model_extra["ignored_params"] == [
        "colour", "include.reasoning.encrypted_content", "reasoning.summary", "service_tier", "text.verbosity",
        "truncation",
    ]  # fmt: skip
    assert (made.service_tier, made.truncation) == ("default", "disabled")
    strict = {"x-pelton-strict-params": "true"}
    refused = httpx.post(f"{url}/v1/responses", json={**ASK, "truncation": "auto"}, headers=strict)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "truncation")


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"conversation": "conv_1"}, "conversation", "not supported"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "not supported"),
        ({"tools": [{"type": "web_search"}]}, "tools", "'web_search'"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice", "no function"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input", "an image"),
        ({"input": [{"type": "computer_call"}]}, "input", "'computer_call'"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input", "no item 'msg_1'"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input", "call_id is missing"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input", "no tool call found"),
        ({"input": []}, "input", "missing"),
        ({"metadata": {"k" * 65: "v"}}, "metadata", "65 characters"),
        ({"metadata": {str(i): "v" for i in range(17)}}, "metadata", "17 pairs"),
        ({"metadata": {"k": "v" * 513}}, "metadata", "513 characters"),
        ({"top_logprobs": 2}, "top_logprobs", "include"),
        ({"max_output_tokens": 0}, "max_output_tokens", ">= 1"),
        ({"max_tokens": 5}, "max_tokens", "not supported"),
        ({"n": 2}, "n", "not supported"),
        ({"background": True, "store": False}, "background", "store"),
        ({"service_tier": "flex", "priority": 3}, "service_tier", "exclude"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text", "schema is missing"),
        ({"previous_response_id": "resp_x"}, "previous_response_id", "not found"),
    ],
)  # fmt: skip
def test_what_is_refused(url, fields, param, words):
    error = refused(url, **fields)
    assert error["param"] == param
    assert words in error["message"]


def test_errors_name_the_fields_of_this_operation(url, service):
    service.refuse = ContextLengthExceeded("too long", param="messages")
    assert (refused(url)["param"], refused(url)["code"]) == ("input", "context_length_exceeded")
    assert refused(url, background=True)["param"] == "input"


def test_a_failure_in_mid_stream(client, service):
    service.fail_after = 2
    events = list(client.responses.create(**ASK, stream=True))
    assert [each.type for each in events[-2:]] == ["error", "response.failed"]
    failed = events[-1].response
    assert (failed.status, failed.error.code, failed.error.message) == ("failed", "server_error", "the engine broke")
    assert client.responses.retrieve(failed.id) == failed
    assert (failed.output_text, failed.output[0].status) == ("Hello", "incomplete")
    with pytest.raises(openai.BadRequestError, match="is failed"):
        client.responses.create(**ASK, previous_response_id=failed.id)


def test_input_tokens(client):
    counted = client.responses.input_tokens.count(**ASK)
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", len("<user>Hi<assistant>"))
    first = client.responses.create(**ASK)
    more = client.responses.input_tokens.count(model="scripted", input="More", previous_response_id=first.id)
    assert more.input_tokens > counted.input_tokens


def test_service_tier_and_notes_of_chats(url, service):
    chat = {"model": "scripted", "messages": [{"role": "user", "content": "Hi"}]}
    path = f"{url}/v1/chat/completions"
    for asked, told, priority in (("auto", "default", 0), ("flex", "flex", 100), ("fast", "priority", -100)):
        made = httpx.post(path, json={**chat, "service_tier": asked, "user": "", "safety_identifier": "ada"}).json()
        assert (made["service_tier"], service.requests[-1].priority) == (told, priority)
        assert service.requests[-1].user == "ada"
        assert "ignored_params" not in made
    made = httpx.post(path, json={**chat, "service_tier": "scale", "metadata": {"a": "b"}, "store": True}).json()
    assert (made["service_tier"], made["ignored_params"]) == ("default", ["metadata", "service_tier", "store"])
    assert "service_tier" not in httpx.post(path, json=chat).json()
    response = httpx.post(path, json={**chat, "metadata": {"a": "b" * 600}})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "metadata")
