"""Tools and reasoning in the OpenAI dialect, by the unmodified `openai` client."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx2 as httpx
import openai
import pytest

from pelton.request import TextDelta, TextFinish, Tool, ToolCallBegin, ToolCallDelta, ToolCallEnd, ToolChoice
from tests.server.scripted import ScriptedService

MESSAGES = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now", "strict": True}},
]
EVENTS = (
    TextDelta(choice=0, text="They ask", kind="reasoning"),
    TextDelta(choice=0, text=" twice.", kind="reasoning"),
    TextDelta(choice=0, text="Let me see."),
    ToolCallBegin(choice=0, index=0, id="call_a", name="weather"),
    ToolCallDelta(choice=0, index=0, arguments='{"city": '),
    ToolCallDelta(choice=0, index=0, arguments='"Oslo"}'),
    ToolCallEnd(choice=0, index=0),
    ToolCallBegin(choice=0, index=1, id="call_b", name="now"),
    ToolCallDelta(choice=0, index=1, arguments="{}"),
    ToolCallEnd(choice=0, index=1),
    TextFinish(choice=0, reason="tool_calls", warnings=("Look out.",)),
)


@pytest.fixture
def service() -> ScriptedService:
    return ScriptedService(events=EVENTS)


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as each:
        yield each


def test_a_whole_answer(client):
    answer = client.chat.completions.create(model="scripted", messages=MESSAGES, tools=TOOLS)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    assert choice.message.reasoning_content == "They ask twice."
    calls = [(call.id, call.type, call.function.name, call.function.arguments) for call in choice.message.tool_calls]
    assert calls == [("call_a", "function", "weather", '{"city": "Oslo"}'), ("call_b", "function", "now", "{}")]
    assert answer.model_extra["warnings"] == ["Look out."]
    assert "index" not in choice.message.tool_calls[0].model_dump()


def test_content_is_null_where_there_are_only_calls(client, service):
    service.events = EVENTS[3:]
    answer = client.chat.completions.create(model="scripted", messages=MESSAGES, tools=TOOLS)
    assert answer.choices[0].message.content is None
    assert "reasoning_content" not in answer.choices[0].message.model_extra


def test_a_stream(client):
    with client.chat.completions.stream(model="scripted", messages=MESSAGES, tools=TOOLS) as stream:
        events = list(stream)
    deltas = [event.arguments_delta for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert deltas == ["", '{"city": ', '"Oslo"}', "", "{}"]
    chunks = [event.chunk for event in events if event.type == "chunk"]
    assert len({chunk.id for chunk in chunks}) == 1
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert [call.index for call in calls] == [0, 0, 0, 1, 1]
    assert [call.id for call in calls] == ["call_a", None, None, "call_b", None]
    assert [call.function.name for call in calls] == ["weather", None, None, "now", None]
    thought = "".join((chunk.choices[0].delta.model_extra or {}).get("reasoning_content") or "" for chunk in chunks)
    assert thought == "They ask twice."
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert chunks[-1].model_extra["warnings"] == ["Look out."]
    final = stream.get_final_completion().choices[0]
    assert final.message.content == "Let me see."
    assert [json.loads(call.function.arguments) for call in final.message.tool_calls] == [{"city": "Oslo"}, {}]


def test_what_was_asked_reaches_the_service(client, service):
    client.chat.completions.create(
        model="scripted",
        messages=[
            {"role": "developer", "content": "Be kind."},
            *MESSAGES,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "call_a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "x"}'}}
                ],
            },
            {"role": "tool", "tool_call_id": "call_a", "content": "5 degrees"},
        ],
        tools=TOOLS,
        parallel_tool_calls=False,
        reasoning_effort="low",
        extra_body={"reasoning_budget": 7},
    )
    (request,) = service.requests
    assert request.tools == (
        Tool(name="weather", description="Of a city.", parameters=SCHEMA),
        Tool(name="now", strict=True),
    )
    assert (request.tool_choice, request.parallel_tool_calls) == (ToolChoice(), False)
    assert (request.reasoning_effort, request.reasoning_budget) == ("low", 7)
    assert [message.role for message in request.messages] == ["developer", "user", "assistant", "tool"]
    assert (request.messages[3].tool_call_id, request.messages[2].content) == ("call_a", None)
    assert (request.add_generation_prompt, request.continue_final_message) == (True, False)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("none", ToolChoice(mode="none")),
        ("required", ToolChoice(mode="required")),
        ({"type": "function", "function": {"name": "now"}}, ToolChoice(mode="required", names=("now",))),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "weather"}}]},
            },
            ToolChoice(mode="auto", names=("weather",)),
        ),
    ],
)
def test_tool_choice(client, service, given, expected):
    client.chat.completions.create(model="scripted", messages=MESSAGES, tools=TOOLS, tool_choice=given)
    assert service.requests[0].tool_choice == expected


def test_a_last_message_of_the_assistant_is_gone_on_with(client, service):
    messages = [*MESSAGES, {"role": "assistant", "content": "Once upon"}]
    client.chat.completions.create(model="scripted", messages=messages)
    client.chat.completions.create(model="scripted", messages=messages, extra_body={"add_generation_prompt": True})
    told = [(request.add_generation_prompt, request.continue_final_message) for request in service.requests]
    assert told == [(False, True), (True, False)]


@pytest.mark.parametrize(
    "wrong",
    [
        {"tools": [{"type": "retrieval"}]},
        {"tools": TOOLS, "tool_choice": "always"},
        {"tools": TOOLS, "tool_choice": {"type": "function"}},
        {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
        {"reasoning_effort": "much"},
    ],
)
def test_what_is_wrong_is_a_400_that_names_the_field(url, wrong):
    body = {"model": "scripted", "messages": MESSAGES, **wrong}
    response = httpx.post(f"{url}/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == list(wrong)[-1]
