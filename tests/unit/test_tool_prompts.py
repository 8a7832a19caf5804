"""Which dialect a model has, and how tools are told to one whose template knows none."""

from __future__ import annotations

import json

import pytest

from pelton import config
from pelton.errors import ConfigError, InvalidRequest
from pelton.request import Message, Request, Tool
from pelton.text.reasoning import KNOWN, is_open, switches_of, tags_of
from pelton.text.tools.detect import DIALECTS, dialect_of, shows_tools
from pelton.text.tools.prompt import INSTRUCTIONS, told_in_text
from tests.unit import chat_templates as templates

QWEN = (
    "For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML "
    'tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
LLAMA_4 = (
    "{{- 'You SHOULD NOT include any other text in the response if you call a function' }}"
    "{{- '[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]' }}"
    "{{- '<|python_start|>' + message.content + '<|python_end|>' }}"
)
LLAMA_3_2 = (
    '{%- if not tools is defined %}{{- \'Respond in the format {"name": function name, "parameters": dictionary of '
    'argument name and its value}.\' }}{{- "Environment: ipython\\n" }}{{- \'"parameters": \' }}'
)
DEEPSEEK_V3 = (
    "{{'<｜Assistant｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + "
    "tool['function']['name'] + '\\n' + '```json' + '\\n' + tool['function']['arguments'] + '\\n' + '```' + "
    "'<｜tool▁call▁end｜>'}}"
)
DEEPSEEK_V31 = (
    "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ tool['function']['name'] + '<｜tool▁sep｜>' + "
    "tool['function']['arguments'] + '<｜tool▁call▁end｜>'}}"
)
MISTRAL_SMALL = "{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}"


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (QWEN, "hermes"),
        (templates.THINKING, "hermes"),
        (templates.LLAMA3, "llama3"),
        (LLAMA_3_2, "llama3"),
        (LLAMA_4, "pythonic"),
        (templates.MISTRAL, "mistral"),
        (MISTRAL_SMALL, "mistral-named"),
        (DEEPSEEK_V3, "deepseek-fenced"),
        (DEEPSEEK_V31, "deepseek"),
        (templates.CHATML, "json"),
        (templates.GEMMA, "json"),
    ],
)
def test_the_dialect_is_found_by_the_template(template, name):
    assert dialect_of(template).name == name


def test_which_templates_show_tools():
    shown = [shows_tools(each) for each in (templates.LLAMA3, templates.MISTRAL, templates.THINKING)]
    assert shown == [True] * 3
    assert not shows_tools(templates.CHATML)
    assert not shows_tools(templates.GEMMA)


def test_the_setting_knows_all_dialects():
    assert set(config.TOOL_DIALECTS) == {"auto", *DIALECTS}
    assert config.load(tool_dialect="mistral").text.tool_dialect == "mistral"
    with pytest.raises(ConfigError, match="tool_dialect"):
        config.load(tool_dialect="klingon")


TOOLS = [Tool(name="f", description="Of a city.", parameters={"type": "object"}), Tool(name="g")]


def test_tools_are_told_by_the_system():
    asked = Message(role="user", content="Hi")
    alone = told_in_text([asked], TOOLS)
    assert [each.role for each in alone] == ["system", "user"]
    assert isinstance(alone[0].content, str)
    lines = alone[0].content.removeprefix(INSTRUCTIONS).strip().splitlines()
    assert [json.loads(line)["name"] for line in lines] == ["f", "g"]
    merged = told_in_text([Message(role="system", content="Be kind."), asked], TOOLS)
    assert [each.role for each in merged] == ["system", "user"]
    assert merged[0].content[0] == {"type": "text", "text": "Be kind."}
    assert told_in_text([asked], []) == [asked]


def test_calls_and_results_become_text():
    calls = (
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
        {"id": "2", "type": "function", "function": {"name": "g", "arguments": {}}},
    )
    chat = [
        Message(role="user", content="Hi"),
        Message(role="assistant", content="Let me see.", tool_calls=calls),
        Message(role="tool", tool_call_id="1", content="one"),
        Message(role="tool", tool_call_id="2", content=({"type": "text", "text": "two"},)),
    ]
    _, _, called, results = told_in_text(chat, TOOLS)
    assert called.content == 'Let me see.\n{"name": "f", "arguments": {"a": 1}}\n{"name": "g", "arguments": {}}'
    assert called.tool_calls is None
    assert (results.role, results.content) == ("user", "f gave: one\ng gave: two")
    with pytest.raises(InvalidRequest, match=r"messages\[0\]"):
        told_in_text([Message(role="assistant", tool_calls=({"id": "1"},))], TOOLS)


def test_tags_of_templates_and_vocabularies():
    assert tags_of(templates.THINKING) == KNOWN[0]
    assert tags_of(templates.CHATML) is None
    assert tags_of("", ["[THINK]", "[/THINK]"]) == KNOWN[1]


def test_whether_the_prompt_has_opened_them():
    assert is_open("<|im_start|>assistant\n<think>\n", KNOWN[0])
    assert not is_open("<|im_start|>assistant\n<think>\n\n</think>\n\n", KNOWN[0])


def switches(template: str, **fields: object) -> tuple[dict[str, object], int | None, int]:
    """(variables, budget, number of warnings)."""
    request = Request(id="r", model="m", **fields)  # type: ignore[arg-type]
    found = switches_of(template, tags_of(template), request)
    return found.variables, found.budget, len(found.warnings)


def test_switches_of_thinking():
    qwen, granite = "{% if enable_thinking %}</think>", "{% if thinking %}{{ reasoning_effort }}</think>"
    assert switches(qwen, thinking=False) == ({"enable_thinking": False}, None, 0)
    assert switches(qwen, reasoning_effort="low") == ({"enable_thinking": True}, None, 0)
    assert switches(granite, reasoning_effort="low") == ({"reasoning_effort": "low"}, None, 0)
    assert switches(granite, reasoning_effort="none") == ({"thinking": False}, None, 0)
    assert switches(qwen, reasoning_budget=7) == ({}, 7, 0)
    assert switches(qwen) == ({}, None, 0)


def test_thoughts_that_have_no_switch_are_ended_at_once():
    assert switches("</think>", thinking=False) == ({}, 0, 0)
    assert switches("</think>", thinking=True, reasoning_budget=5) == ({}, 5, 0)


def test_a_model_that_does_not_think_says_so():
    assert switches("", thinking=True) == ({}, None, 1)
    assert switches("", reasoning_effort="high") == ({}, None, 1)
    assert switches("", reasoning_budget=3) == ({}, None, 1)
    assert switches("", thinking=False) == switches("", reasoning_effort="none") == ({}, None, 0)
