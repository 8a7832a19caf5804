"""Inputs made to be too much: a 4xx at once, with a short body, and a server that goes on."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Iterator

import httpx2 as httpx
import pytest

from pelton.checks import check_sampling
from pelton.request import Request, TextEvent
from tests.server.scripted import ScriptedService, serving

MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT = {"model": "scripted", "messages": MESSAGES}
TEXT = {"model": "scripted", "prompt": "Hi"}


class CheckedService(ScriptedService):
    """Checks parameters as the real one does."""

    async def generate(self, request: Request) -> AsyncGenerator[TextEvent, None]:
        check_sampling(request.sampling, 1000)
        return await super().generate(request)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(CheckedService(), max_body=8 << 20) as address:
        yield address


def nested(depth: int, inner: object = 1) -> str:
    return '{"a":' * depth + json.dumps(inner) + "}" * depth


def raw(body: dict, **fields: str) -> bytes:
    """The body with more fields, whose values are JSON already."""
    more = "".join(f', "{name}": {value}' for name, value in fields.items())
    return (json.dumps(body)[:-1] + more + "}").encode()


MANY = {
    "n": raw(CHAT, n="1000000000"),
    "n of 64 bits": raw(CHAT, n=str(1 << 70)),
    "best_of": raw(TEXT, best_of="1000000000"),
    "prompts times n": json.dumps({**TEXT, "prompt": ["a"] * 200, "n": 100}).encode(),
    "prompts": json.dumps({**TEXT, "prompt": ["a"] * 100_000}).encode(),
    "max_tokens": raw(CHAT, max_tokens="-1"),
    "top_logprobs": raw(CHAT, logprobs="true", top_logprobs="1000000000"),
    "logprobs": raw(TEXT, logprobs="1000000000"),
    "prompt_logprobs": raw(TEXT, prompt_logprobs="1000000000"),
    "beam_width": raw(CHAT, use_beam_search="true", beam_width="1000000000"),
    "stops": raw(CHAT, stop=json.dumps(["x"] * 500_000)),
    "a long stop": raw(CHAT, stop=json.dumps("x" * 1_000_000)),
    "bad_words": raw(CHAT, bad_words=json.dumps(["x"] * 500_000)),
    "logit_bias": raw(CHAT, logit_bias=json.dumps({str(i): 1 for i in range(300_000)})),
    "a bias of infinity": raw(CHAT, logit_bias='{"1": 1e400}'),
    "stop_token_ids": raw(CHAT, stop_token_ids="[5000]"),
    "negative ids": raw(CHAT, allowed_token_ids="[-1]"),
    "unknown fields": raw(CHAT, **{f"f{i}": "1" for i in range(200_000)}),
    "unknown fields of messages": json.dumps({**CHAT, "messages": [{**MESSAGES[0], "x": 1}] * 50_000}).encode(),
    "an endless number": raw(CHAT, seed="9" * 100_000),
    "depth": raw(CHAT, ignored=nested(100_000)),
    "depth that decodes": raw(CHAT, ignored=nested(200)),
    "depth of lists": raw(CHAT, metadata="[" * 300 + "]" * 300),
    "a deep schema": raw(CHAT, response_format='{"type": "json_schema", "schema": ' + nested(150) + "}"),
    "a deep template argument": raw(CHAT, chat_template_kwargs=nested(150)),
    "binary": bytes(range(256)) * 100,
    "half a character": raw(CHAT, user='"\\ud800"'),
    "nothing": b"",
    "too much": b" " * (9 << 20),
}


@pytest.mark.parametrize("name", MANY)
def test_too_much_is_refused_at_once(url, name):
    path = "/v1/completions" if b'"prompt"' in MANY[name][:60] else "/v1/chat/completions"
    began = time.monotonic()
    response = httpx.post(url + path, content=MANY[name], timeout=30)
    took = time.monotonic() - began
    assert response.status_code in (400, 413), response.text[:200]
    assert len(response.content) < 1000
    assert took < 10  # half a second on an idle machine, for the largest
    assert httpx.get(url + "/health").status_code == 200


def test_names_of_what_is_ignored_are_cut(url):
    response = httpx.post(url + "/v1/chat/completions", content=raw(CHAT, **{"x" * 100_000: "1"}))
    assert response.status_code == 200
    assert len(response.content) < 2000


def test_what_is_within_the_bounds_is_taken(url):
    body = raw(CHAT, n="100", max_tokens=str(1 << 70), unknown=nested(120), logit_bias='{"1": 100}', stop='["x"]')
    assert httpx.post(url + "/v1/chat/completions", content=body).status_code == 200


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("https://evil.example", 403),
        ("null", 403),
        ("http://localhost.evil.example", 403),
        ("http://[bad", 403),
        ("http://localhost:3000", 200),
        ("http://127.0.0.1:8000", 200),
        ("http://[::1]:8000", 200),
    ],
)
def test_pages_from_elsewhere_do_not_come_in_without_a_key(url, origin, status):
    # What a page may send without asking first: a POST of plain text.
    headers = {"origin": origin, "content-type": "text/plain"}
    assert httpx.post(url + "/v1/chat/completions", json=CHAT, headers=headers).status_code == status
    assert httpx.get(url + "/v1/models", headers=headers).status_code == status
