"""Tool calls and structured output over HTTP with a real model, which knows no tools: a grammar makes it call them."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest

from tests.e2e.pelton_process import Server, serving

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER, "strict": True}},
    {"type": "function", "function": {"name": "now"}},
]
ASK = [{"role": "user", "content": "What is the weather in Oslo?"}]
BASE = {"model": "m", "messages": ASK, "temperature": 0, "max_tokens": 120}


@pytest.fixture(scope="module")
def server(tmp_path_factory, smollm2) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("home")
    with serving(home, str(smollm2), "--served-name", "m", "--context", "1024", "--threads", "2") as each:
        yield each


@pytest.fixture
def client(server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_a_named_tool_is_called_streamed_and_not(client):
    body = {**BASE, "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "get_weather"}}}
    (choice,) = client.chat.completions.create(**body, parallel_tool_calls=False).choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "get_weather"
    assert list(arguments) == ["city", "unit"]
    assert len(arguments["city"]) <= 12
    assert arguments["unit"] in ("C", "F")
    assert choice.message.content is None
    with client.chat.completions.stream(**body, parallel_tool_calls=False) as stream:
        (streamed,) = stream.get_final_completion().choices
    assert streamed.finish_reason == "tool_calls"
    assert streamed.message.tool_calls[0].function.arguments == call.function.arguments


def test_required_calls_of_many_choices(client):
    answer = client.chat.completions.create(
        **{**BASE, "temperature": 1.3}, tools=TOOLS, tool_choice="required", n=3, seed=5, parallel_tool_calls=False
    )
    for choice in answer.choices:
        (call,) = choice.message.tool_calls
        assert call.function.name in ("get_weather", "now")
        assert isinstance(json.loads(call.function.arguments), dict)
    assert len({choice.message.tool_calls[0].id for choice in answer.choices}) == 3


def test_a_call_that_is_cut_ends_with_length(client):
    (choice,) = client.chat.completions.create(
        **{**BASE, "max_tokens": 16}, tools=TOOLS[:1], tool_choice="required"
    ).choices
    assert choice.finish_reason == "length"


def test_a_chat_with_results_of_tools_goes_on(client):
    call = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
    ]
    answer = client.chat.completions.create(**{**BASE, "messages": messages, "max_tokens": 8}, tools=TOOLS[1:])
    assert answer.usage.completion_tokens > 0


@pytest.mark.parametrize(
    ("given", "is_right"),
    [
        ({"guided_choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
        ({"structured_outputs": {"regex": "[0-9]{3}-[a-f]{2}"}}, lambda text: len(text) == 6 and text[3] == "-"),
        ({"grammar": 'root ::= ("ab" | "cd"){2} "!"'}, lambda text: len(text) == 5 and text.endswith("!")),
        (
            {"guided_grammar": 'start: "x" NUMBER\nNUMBER: /[0-9]{2}/'},
            lambda text: text[1:].isdigit() and len(text) == 3,
        ),
    ],
)
def test_other_forms(client, given, is_right):
    (choice,) = client.chat.completions.create(**BASE, extra_body=given).choices
    assert choice.finish_reason == "stop"
    assert is_right(choice.message.content), choice.message.content


def test_what_cannot_be_enforced_is_refused_or_told(client):
    schema = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 3, "maxItems": 3, "uniqueItems": True}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    with pytest.raises(openai.BadRequestError, match="uniqueItems"):
        client.chat.completions.create(**BASE, response_format=form)
    form["json_schema"]["strict"] = False
    answer = client.chat.completions.create(**BASE, response_format=form)
    value = json.loads(answer.choices[0].message.content)
    assert len(value) == 3
    told, fault = answer.model_extra["warnings"]
    assert "uniqueItems" in told
    assert "non-unique" in fault


def test_a_strict_tool_whose_schema_cannot_be_enforced_is_refused(client):
    function = {"name": "f", "strict": True, "parameters": {"type": "object", "not": {}}}
    with pytest.raises(openai.BadRequestError, match="not"):
        client.chat.completions.create(**BASE, tools=[{"type": "function", "function": function}])
