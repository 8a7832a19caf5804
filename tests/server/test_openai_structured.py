"""How clients describe an answer in the OpenAI dialect, and what reaches the service of it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx2 as httpx
import pytest

from pelton.request import Grammar
from tests.server.scripted import ScriptedService, serving

CHAT = {"model": "scripted", "messages": [{"role": "user", "content": "Hi"}]}
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "integer"}}}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))
TAGS = {"structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}], "triggers": ["<a>"]}


@pytest.fixture(scope="module")
def service() -> ScriptedService:
    return ScriptedService()


@pytest.fixture(scope="module")
def url(service: ScriptedService) -> Iterator[str]:
    with serving(service) as address:
        yield address


def post(url: str, body: dict[str, object]) -> httpx.Response:
    if "prompt" in body:
        return httpx.post(f"{url}/v1/completions", json={"model": "scripted", **body})
    return httpx.post(f"{url}/v1/chat/completions", json={**CHAT, **body})


def of_schema(param: str, is_strict: bool = True) -> Grammar:
    return Grammar(kind="json_schema", text=TEXT, param=param, is_strict=is_strict)


FORMAT = "response_format.json_schema.schema"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        (
            {"response_format": {"type": "json_object"}},
            Grammar(kind="json_schema", text='{"type":"object"}', param="response_format.schema"),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            of_schema(FORMAT),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": False}}},
            of_schema(FORMAT, is_strict=False),
        ),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, of_schema("response_format.schema")),
        ({"guided_json": SCHEMA}, of_schema("guided_json")),
        ({"guided_json": TEXT, "prompt": "Hi"}, of_schema("guided_json")),
        ({"structured_outputs": {"json": SCHEMA}}, of_schema("structured_outputs.json")),
        ({"guided_regex": "a+"}, Grammar(kind="regex", text="a+", param="guided_regex")),
        ({"structured_outputs": {"regex": "a+"}}, Grammar(kind="regex", text="a+", param="structured_outputs.regex")),
        ({"guided_choice": ["a", "b"]}, Grammar(kind="choice", text='["a","b"]', param="guided_choice")),
        ({"guided_grammar": 'start: "a"'}, Grammar(kind="lark", text='start: "a"', param="guided_grammar")),
        ({"guided_grammar": 'root ::= "a"'}, Grammar(kind="gbnf", text='root ::= "a"', param="guided_grammar")),
        ({"grammar": 'root ::= "a"', "prompt": "Hi"}, Grammar(kind="gbnf", text='root ::= "a"', param="grammar")),
        (
            {"response_format": {"type": "structural_tag", **TAGS}},
            Grammar(kind="structural_tag", text=json.dumps(TAGS, separators=(",", ":")), param="response_format"),
        ),
        (
            {"structured_outputs": {"structural_tag": json.dumps(TAGS)}},
            Grammar(kind="structural_tag", text=json.dumps(TAGS), param="structured_outputs.structural_tag"),
        ),
    ],
)
def test_every_spelling(url, service, given, expected):
    response = post(url, given)
    assert response.status_code == 200, response.text
    assert service.requests[-1].grammar == expected
    assert "ignored_params" not in response.json()


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "regex"}}, "response_format"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [""]}, "guided_choice"),
        ({"guided_json": "{"}, "guided_json"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
        ({"guided_regex": "a", "guided_json": SCHEMA}, "guided_regex"),
    ],
)
def test_what_is_wrong_is_a_400_that_names_the_field(url, given, param):
    response = post(url, given)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
