"""Structured output over HTTP with a real model."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.e2e.pelton_process import Server, serving

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 1, "maximum": 120},
        "hobbies": {"type": "array", "items": {"enum": ["chess", "golf", "tennis"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "hobbies"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
ASK = [{"role": "user", "content": "Invent a person and describe them as JSON."}]


@pytest.fixture(scope="module")
def server(tmp_path_factory, smollm2) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("home")
    with serving(home, str(smollm2), "--served-name", "m", "--context", "1024", "--threads", "2") as each:
        yield each


@pytest.fixture
def client(server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def check(text: str) -> None:
    person = json.loads(text)
    assert list(person) == ["name", "age", "hobbies"]
    assert len(person["name"]) <= 20
    assert 1 <= person["age"] <= 120
    assert 1 <= len(person["hobbies"]) <= 2
    assert set(person["hobbies"]) <= {"chess", "golf", "tennis"}


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_an_answer_is_of_its_schema_streamed_and_not(client, temperature):
    body = {"model": "m", "messages": ASK, "response_format": FORMAT, "temperature": temperature, "seed": 3}
    whole = client.chat.completions.create(**body, max_tokens=200)
    check(whole.choices[0].message.content)
    assert whole.choices[0].finish_reason == "stop"
    chunks = client.chat.completions.create(**body, max_tokens=200, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content


def test_choices_and_company(client):
    body = {"model": "m", "messages": ASK, "temperature": 1.2, "max_tokens": 200}

    def ask(i: int) -> list[str]:
        extra = {"response_format": FORMAT, "n": 2} if i % 2 else {"max_tokens": 40}
        answer = client.chat.completions.create(**{**body, **extra, "seed": i})
        return [choice.message.content for choice in answer.choices]

    alone = [ask(i) for i in range(6)]
    with ThreadPoolExecutor(6) as threads:
        together = list(threads.map(ask, range(6)))
    assert together == alone
    for answers in alone[1::2]:
        assert answers[0] != answers[1]
        for answer in answers:
            check(answer)


def test_json_mode_gives_an_object(client):
    answer = client.chat.completions.create(
        model="m", messages=ASK, response_format={"type": "json_object"}, temperature=0, max_tokens=300
    )
    choice = answer.choices[0]
    assert choice.message.content.startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_cannot_be_enforced_is_a_400_that_names_the_keyword(client, stream):
    schema = {"type": "array", "uniqueItems": True, "items": {"type": "integer"}}
    given = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match="uniqueItems") as caught:
        client.chat.completions.create(model="m", messages=ASK, response_format=given, stream=stream)
    assert caught.value.body["param"] == "response_format.json_schema.schema"


def test_a_huge_schema_is_refused_at_once(client):
    given = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["x" * 100] * 2000}}}
    with pytest.raises(openai.BadRequestError, match="characters"):
        client.chat.completions.create(model="m", messages=ASK, response_format=given)


def test_an_engine_that_was_started_again_is_taught_again(server, client):
    before = server.engines()
    os.kill(before[0], signal.SIGKILL)
    while server.engines() in ([], before):
        time.sleep(0.05)
    answer = client.chat.completions.create(
        model="m", messages=ASK, response_format=FORMAT, temperature=0, max_tokens=200
    )
    check(answer.choices[0].message.content)
