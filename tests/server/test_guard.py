"""What stands before every route: keys, scopes, limits, CORS, bounds."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import resource
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx
import openai
import pytest

from pelton.config import ServerConfig, load
from pelton.errors import ConfigError
from pelton.server import meter
from pelton.server.app import App
from pelton.server.keys import KeyStore
from pelton.server.ledger import used
from pelton.server.limits import Limits
from pelton.server.listen import Server
from pelton.server.store import Store
from tests.server.scripted import ScriptedPool, ScriptedService, serving, serving_pool

MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT = {"model": "scripted", "messages": MESSAGES}
PATH = "/v1/chat/completions"


def operations() -> list[tuple[str, str]]:
    app = App(ScriptedPool(ScriptedService()), ServerConfig())  # type: ignore[arg-type]
    return [(each.method, re.sub(r"{.*?}", "x", each.path)) for each in app.operations if each.path != "/health"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "server.sqlite"


@pytest.fixture
def keys(file: Path) -> Iterator[KeyStore]:
    store = Store(file)
    yield KeyStore(store)
    store.close()


@pytest.fixture
def pool(service: ScriptedService) -> ScriptedPool:
    return ScriptedPool(service)


@pytest.fixture
def url(pool: ScriptedPool, file: Path) -> Iterator[str]:
    with serving_pool(pool, store=str(file)) as address:  # type: ignore[arg-type]
        yield address


def bearer(text: str) -> dict[str, str]:
    return {"authorization": f"Bearer {text}"}


def test_every_route_but_health_needs_a_key(service):
    with serving(service, api_key="secret") as url, httpx.Client() as client:
        assert len(operations()) > 5
        for method, path in [*operations(), ("GET", "/nothing"), ("PUT", PATH)]:
            for headers in ({}, bearer("wrong"), {"x-api-key": "secre"}, {"authorization": "secret"}):
                response = client.request(method, url + path, headers=headers)
                assert response.status_code == 401, (method, path)
                assert response.headers["www-authenticate"] == "Bearer"
                assert method == "HEAD" or re.search("invalid_api_key|authentication|key", response.text)
            for headers in (bearer("secret"), {"x-api-key": "secret"}, {**bearer("none"), "x-api-key": "secret"}):
                assert client.request(method, url + path, headers=headers).status_code != 401, (method, path)
        assert client.get(url + "/health").status_code == 200
    assert not service.requests


def test_the_openai_client_says_what_is_wrong(url, keys):
    _, text = keys.create("ada")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="sk-wrong", max_retries=0)
    with client, pytest.raises(openai.AuthenticationError, match="not known"):
        client.models.list()
    with openai.OpenAI(base_url=f"{url}/v1", api_key=text, max_retries=0) as client:
        assert client.chat.completions.create(**CHAT).choices[0].message.content == "Hello 🦙"
    keys.revoke("ada")
    assert httpx.get(url + "/v1/models", headers=bearer(text)).status_code == 401


def test_the_first_key_closes_the_door_of_a_running_server(url, keys):
    assert httpx.get(url + "/v1/models").status_code == 200
    keys.create("ada")
    assert httpx.get(url + "/v1/models").status_code == 401


def test_scopes(url, keys):
    _, plain = keys.create("plain")
    _, more = keys.create("more", scopes=["models"])
    pins = url + "/v1/prefix_cache/pins"
    response = httpx.get(pins, headers=bearer(plain))
    assert response.status_code == 403
    assert "'models'" in response.json()["error"]["message"]
    assert httpx.get(pins, headers=bearer(more)).status_code != 403
    unload = {"model": "scripted", "keep_alive": 0}
    statuses = [
        httpx.post(url + "/api/generate", json=unload, headers=bearer(key)).status_code for key in (plain, more)
    ]
    assert statuses == [403, 200]
    assert httpx.post(url + PATH, json=CHAT, headers=bearer(more)).status_code == 200


def test_a_key_sees_the_models_that_it_may_use_and_no_others(url, keys, service):
    _, text = keys.create("ada", models=["else"])
    assert httpx.get(url + "/v1/models", headers=bearer(text)).json()["data"] == []
    for response in (
        httpx.get(url + "/v1/models/scripted", headers=bearer(text)),
        httpx.post(url + PATH, json=CHAT, headers=bearer(text)),
        httpx.post(url + "/v1/completions", json={"model": "scripted", "prompt": "x"}, headers=bearer(text)),
    ):
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"
    assert not service.requests
    _, text = keys.create("bob", models=["scripted"])
    assert [card["id"] for card in httpx.get(url + "/v1/models", headers=bearer(text)).json()["data"]] == ["scripted"]


def test_a_key_for_an_alias_sees_the_model_that_has_it(url, keys):
    _, text = keys.create("ada", models=["alias"], scopes=["models"])
    assert [card["id"] for card in httpx.get(url + "/v1/models", headers=bearer(text)).json()["data"]] == ["scripted"]
    assert httpx.get(url + "/v1/models/scripted", headers=bearer(text)).status_code == 200
    loaded = httpx.post(url + "/pelton/models/load", json={"model": "alias"}, headers=bearer(text))
    assert (loaded.status_code, loaded.json().get("name")) == (200, "scripted")
    pinned = httpx.post(
        url + "/v1/prefix_cache/pins", json={"model": "alias", "prompt": "x", "ttl": 60}, headers=bearer(text)
    )
    assert (pinned.status_code, pinned.json().get("model")) == (200, "scripted")


def test_a_request_is_its_keys_whatever_user_it_names(url, keys, service):
    key, text = keys.create("ada")
    httpx.post(url + PATH, json={**CHAT, "user": "somebody"}, headers=bearer(text))
    assert (service.requests[0].tenant, service.requests[0].user) == (key.id, "somebody")


def test_requests_per_minute(url, keys):
    _, text = keys.create("ada", rpm=2)
    for left in (1, 0):
        response = httpx.post(url + PATH, json=CHAT, headers=bearer(text))
        assert response.status_code == 200
        assert response.headers["x-ratelimit-limit-requests"] == "2"
        assert response.headers["x-ratelimit-remaining-requests"] == str(left)
    assert response.headers["x-ratelimit-reset-requests"].endswith("s")
    response = httpx.post(url + PATH, json=CHAT, headers=bearer(text))
    assert response.status_code == 429
    assert 1 <= int(response.headers["retry-after"]) <= 30
    assert response.json()["error"]["code"] == "rate_limit_exceeded"
    assert httpx.get(url + "/v1/models", headers=bearer(text)).status_code == 200  # no work, no limit


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_per_minute_and_usage(url, keys, file, stream):
    key, text = keys.create("ada", tpm=20)
    body = {**CHAT, "max_tokens": 10, "stream": stream}
    response = httpx.post(url + PATH, json=body, headers=bearer(text))
    assert response.headers["x-ratelimit-remaining-tokens"] == "9"  # 1 of the prompt and 10 of the answer put by
    response = httpx.post(url + PATH, json=body, headers=bearer(text))
    assert response.status_code == 200  # it was 8 in the end
    response = httpx.post(url + PATH, json=body, headers=bearer(text))
    assert response.status_code == 429
    assert "20 tokens per minute" in response.json()["error"]["message"]
    time.sleep(1.3)
    store = Store(file)
    [row] = used(store)
    store.close()
    assert (row.key_id, row.model, row.requests, row.failed) == (key.id, "scripted", 2, 0)
    assert (row.prompt_tokens, row.cached_tokens, row.completion_tokens) == (10, 4, 6)


def test_embeddings_count_as_prompts(url, keys, file):
    key, text = keys.create("ada", tpm=20)
    for status in (200, 200, 429):  # each text comes to 5 tokens
        body = {"model": "scripted", "input": ["a", "b"]}
        response = httpx.post(url + "/v1/embeddings", json=body, headers=bearer(text))
        assert response.status_code == status
    time.sleep(1.3)
    store = Store(file)
    [row] = used(store)
    store.close()
    assert (row.key_id, row.requests, row.prompt_tokens, row.completion_tokens) == (key.id, 4, 20, 0)
    _, other = keys.create("eve", scopes=("metrics",))
    assert httpx.post(url + "/v1/embeddings", json=body, headers=bearer(other)).status_code == 403


def test_what_is_refused_costs_no_tokens_and_what_breaks_costs_what_was_made(url, keys, file, service):
    _, text = keys.create("ada", tpm=110)
    service.fail_after = 2
    assert httpx.post(url + PATH, json=CHAT, headers=bearer(text)).status_code == 500
    service.refuse = ConfigError("no")
    assert httpx.post(url + PATH, json=CHAT, headers=bearer(text)).status_code == 400
    time.sleep(1.3)
    store = Store(file)
    [row] = used(store)
    assert (row.requests, row.failed, row.prompt_tokens, row.completion_tokens) == (1, 1, 1, 2)
    [(level,)] = store.read("SELECT level FROM buckets WHERE kind = 'tokens'")
    store.close()
    assert 107 <= level < 110


def test_what_can_come_is_put_by_where_a_request_sets_no_bound(url, keys, file, service, monkeypatch):
    _, text = keys.create("ada", tpm=200)
    answer = httpx.post(url + PATH, json=CHAT, headers=bearer(text))
    assert answer.headers["x-ratelimit-remaining-tokens"] == "101"  # all that the context holds is put by
    answer = httpx.post(url + PATH, json=CHAT, headers=bearer(text))
    assert answer.headers["x-ratelimit-remaining-tokens"] in ("93", "94")  # it was 8 in the end
    monkeypatch.setattr(meter, "RESERVE", 2)
    service.hang_after, service.words = 9, ("w",) * 10
    key, text = keys.create("bob", tpm=60)
    store = Store(file)
    with httpx.stream("POST", url + PATH, json={**CHAT, "stream": True}, headers=bearer(text)) as stream:
        assert stream.headers["x-ratelimit-remaining-tokens"] == "57"
        deadline = time.monotonic() + 10
        level = 60.0
        while level > 51:  # and more as it goes on
            [(level,)] = store.read("SELECT level FROM buckets WHERE key_id = ? AND kind = 'tokens'", (key.id,))
            assert time.monotonic() < deadline
    store.close()


def test_a_client_that_goes_away_while_its_key_is_charged_is_given_back_what_it_took(file, keys, monkeypatch):
    key, _ = keys.create("ada", rpm=10)
    store = Store(file)
    is_held, go = threading.Event(), threading.Event()
    change = Limits._change

    def slow(self: Limits, *args: Any, **more: Any) -> Any:
        work = change(self, *args, **more)

        def run(connection: Any) -> Any:
            is_held.set()
            assert go.wait(10)
            return work(connection)

        return run

    monkeypatch.setattr(Limits, "_change", slow)

    async def take_and_leave() -> None:
        taking = asyncio.create_task(Limits(store, key).take("requests", 4))
        assert await asyncio.to_thread(is_held.wait, 10)
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        go.set()

    asyncio.run(take_and_leave())
    store.write(lambda connection: None).result()  # what was taken is given back behind this, or before it
    store.write(lambda connection: None).result()
    assert store.read("SELECT level FROM buckets WHERE kind = 'requests'") == [(10.0,)]
    store.close()


ORIGIN = {"origin": "https://chat.example"}


def test_cors_on_answers_on_errors_and_before_them(service):
    with serving(service, api_key="secret", cors_origin=("https://chat.example",)) as url:
        asked = {**ORIGIN, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        response = httpx.options(url + PATH, headers=asked)
        assert response.status_code == 200  # a preflight has no key
        assert response.headers["access-control-allow-origin"] == "https://chat.example"
        assert "authorization" in response.headers["access-control-allow-headers"].lower()
        for headers, status in (({}, 401), (bearer("secret"), 200)):
            response = httpx.post(url + PATH, json=CHAT, headers={**ORIGIN, **headers})
            assert response.status_code == status
            assert response.headers["access-control-allow-origin"] == "https://chat.example"
            assert "x-request-id" in response.headers["access-control-expose-headers"].lower()
            assert response.headers["x-request-id"]
        response = httpx.post(url + PATH, json=CHAT, headers={"origin": "https://evil.example", **bearer("secret")})
        assert "access-control-allow-origin" not in response.headers
        asked["origin"] = "https://evil.example"
        assert httpx.options(url + PATH, headers=asked).status_code == 400


def test_parameters_that_would_be_ignored(service):
    body = {**CHAT, "colour": "red", "tools": [], "messages": [{**MESSAGES[0], "mood": 1}]}
    with serving(service) as url:
        assert httpx.post(url + PATH, json=body).json()["ignored_params"] == ["colour", "messages[0].mood"]
        response = httpx.post(url + PATH, json=body, headers={"x-pelton-strict-params": "true"})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "colour")
        assert "messages[0].mood" in response.json()["error"]["message"]
    with serving(service, strict_params=True) as url:
        assert httpx.post(url + PATH, json=body).status_code == 400
        assert httpx.post(url + PATH, json=body, headers={"x-pelton-strict-params": "off"}).status_code == 200
        assert httpx.post(url + PATH, json=CHAT).status_code == 200


def raw(url: str, data: bytes, *, pause: float = 0.0, pause_at: int = 0) -> bytes:
    """What a server says to these bytes, each sent after a pause where there is one, until it closes. `pause_at`: after
    so many of them it is given the time for an answer."""
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
        try:
            if pause_at:
                connection.sendall(data[:pause_at])
                time.sleep(0.3)
                data = data[pause_at:]
            for piece in [data] if not pause else [data[i : i + 1] for i in range(len(data))]:
                connection.sendall(piece)
                time.sleep(pause)
        except OSError:
            pass  # it has closed already
        answer = b""
        try:
            while more := connection.recv(65536):
                answer += more
        except ConnectionResetError:
            pass
        return answer


def test_headers_are_bounded(service):
    with serving(service, max_headers=4000, header_timeout=3) as url:
        assert httpx.get(url + "/v1/models", headers={"x-long": "a" * 5000}).status_code == 431
        assert httpx.get(url + "/v1/models", headers={f"x-{i}": "1" for i in range(201)}).status_code == 431
        assert httpx.get(url + "/v1/models", headers={"x-long": "a" * 3000}).status_code == 200
        began = time.monotonic()
        assert raw(url, b"GET / HTTP/1.1\r\nx-endless: " + b"a" * 1_000_000).startswith(b"HTTP/1.1 431")
        assert raw(url, b"GET /" + b"a" * 1_000_000).startswith(b"HTTP/1.1 431")
        assert time.monotonic() - began < 2


def test_what_is_sent_behind_a_request_is_bounded_too(service):
    service.delay = 0.6
    body = json.dumps({**CHAT, "stream": True}).encode()
    first = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
    with serving(service, max_headers=4000, header_timeout=0.3) as url:
        began = time.monotonic()
        for behind, status in (
            (b"GET / HTTP/1.1\r\nx-endless: " + b"a" * 300_000, b"431"),
            (b"GET / HTTP/1.1\r\nx-slow: ", b"408"),
            (b"what is this\r\n\r\n", b"400"),
        ):
            answer = raw(url, first + behind)
            assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"200", status]
            # Not in the middle of the answer that was running.
            assert answer.index(b"data: [DONE]\n\n\r\n0\r\n\r\nHTTP/1.1 " + status) > 0
        assert time.monotonic() - began < 9
    assert (service.num_open, service.num_ended) == (0, 3)


def test_a_body_that_is_no_http_is_refused_at_once(service):
    with serving(service) as url:
        began = time.monotonic()
        head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".encode()
        assert raw(url, head + b"no size\r\n").startswith(b"HTTP/1.1 400 ")
        assert time.monotonic() - began < 5


def test_there_are_no_websockets(service, caplog):
    asked = b"connection: upgrade\r\nsec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    head = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nupgrade: %b\r\n" + asked + b"\r\n"
    with serving(service, header_timeout=0.3) as url:
        answer = raw(url, head % b"WebSocket")
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"no WebSockets here" in answer
        assert raw(url, head % b"h2c").startswith(b"HTTP/1.1 200 ")  # which clients ask for, and can do without
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]


def test_the_rest_of_a_body_that_was_answered_before_is_no_head(service):
    with serving(service, max_body=1000, max_headers=4000, header_timeout=1) as url:
        with httpx.Client() as client:
            for path, status in ((PATH, 413), ("/nowhere", 404), ("/health", 405)):
                assert client.post(url + path, content=b"a" * 3_000_000).status_code == status
        began = time.monotonic()
        head = b"POST /nowhere HTTP/1.1\r\nhost: x\r\ncontent-length: 900000\r\n\r\n"
        for rest, says in ((b"", [b"404"]), (b"a" * 500_000, [b"404", b"408"])):  # never ends; ends, and nothing comes
            answer = raw(url, head + b"a" * 400_000 + rest, pause_at=len(head))
            assert re.findall(rb"HTTP/1.1 (\d+)", answer) == says
        assert time.monotonic() - began < 8


def test_whoever_says_it_letter_by_letter_is_shown_the_door(service):
    with serving(service, header_timeout=0.5, body_timeout=0.5) as url:
        began = time.monotonic()
        assert raw(url, b"").startswith(b"HTTP/1.1 408")
        assert raw(url, b"GET /health HTTP/1.1\r\nhost: " + b"x" * 200, pause=0.05).startswith(b"HTTP/1.1 408")
        assert raw(url, b"\r\n" * 50, pause=0.05).startswith(b"HTTP/1.1 408")
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9999\r\n\r\n"
        assert raw(url, head + b'{"a').startswith(b"HTTP/1.1 408")
        assert time.monotonic() - began < 8
        assert httpx.post(url + PATH, json=CHAT).status_code == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_nobody_is_served_from_afar_without_a_key(host, file, keys):
    pool = ScriptedPool(ScriptedService())
    config = ServerConfig(host=host, port=0, store=str(file))

    def open_with(**fields: object) -> None:
        settings = ServerConfig(**{**{f: getattr(config, f) for f in config.__struct_fields__}, **fields})
        Server(pool, settings).close()  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match=r"pelton keys create .* --insecure"):
        open_with()
    open_with(host="127.0.0.1")
    with pytest.raises(ConfigError, match=r"whoever reaches 0\.0\.0\.0"):
        open_with(host="127.0.0.1", ollama="0.0.0.0:0")
    open_with(insecure=True)
    open_with(api_key="secret")
    keys.create("ada")
    open_with()


def test_a_certificate_that_is_none_is_refused(tmp_path):
    (tmp_path / "cert").write_text("no certificate")
    with pytest.raises(ConfigError, match="certificate"):
        Server(ScriptedPool(ScriptedService()), ServerConfig(port=0, ssl_certfile=str(tmp_path / "cert")))  # type: ignore[arg-type]


def test_origins_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("PELTON_CORS_ORIGIN", "https://a.example, https://b.example")
    monkeypatch.setenv("PELTON_HOME", str(tmp_path))
    settings = load().server
    assert settings.cors_origin == ("https://a.example", "https://b.example")
    assert settings.store == str(tmp_path / "server.sqlite")
    assert load(cors_origin=("*",)).server.cors_origin == ("*",)


def test_an_error_says_little_of_a_huge_input(url):
    response = httpx.post(url + PATH, json={**CHAT, "model": "m" * 100_000})
    assert response.status_code == 404
    assert len(response.content) < 1000
    assert len(json.dumps(httpx.get(url + "/" + "n" * 5000).json())) < 1000


PAGES = [
    ({"host": "127.0.0.1:8000"}, 200),
    ({"host": "localhost"}, 200),
    ({"host": "[::1]:8000"}, 200),
    ({"host": "192.168.1.5:8000"}, 200),  # a page would need a name to be of this server's origin
    ({"host": "pelton:8000"}, 200),
    ({"host": "desk.local"}, 200),
    ({"host": "llm.example:8000"}, 200),
    ({"host": "LLM.example."}, 200),
    ({"host": "evil.example"}, 403),
    ({"host": "evil.example:8000", "origin": "http://evil.example:8000"}, 403),
    ({"host": "127.0.0.1.evil.example"}, 403),
    ({"host": "localhost", "origin": "https://evil.example"}, 403),
    ({"host": "localhost", "origin": "null"}, 403),
    ({"host": "localhost", "origin": "http://localhost:3000"}, 200),
    ({"host": "llm.example", "origin": "https://llm.example"}, 200),
    ({"host": "localhost", "origin": "https://chat.example"}, 200),
    ({"host": "localhost", "sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, 403),
    ({"host": "localhost", "sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"}, 200),
]


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_pages_of_others_do_not_get_into_a_server_without_keys(service, method):
    with serving(service, allowed_host=("llm.example",), cors_origin=("https://chat.example",)) as url:
        for headers, status in PAGES:
            path, body = ("/v1/models", None) if method == "GET" else (PATH, json.dumps(CHAT))
            sent = {**headers, "content-type": "text/plain"}  # which a page may send without being asked
            response = httpx.request(method, url + path, headers=sent, content=body)
            assert response.status_code == status, headers
            if status == 403:
                assert re.search("--allowed-host|--cors-origin", response.json()["error"]["message"])
        followed = {"host": "localhost", "sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
        response = httpx.request(method, url + path, headers=followed, content=body)
        assert response.status_code == (200 if method == "GET" else 403)  # a link is followed, a form is not sent
        assert httpx.get(url + "/health", headers={"host": "evil.example"}).status_code == 200


def test_a_server_with_keys_may_be_called_anything(service):
    with serving(service, api_key="secret") as url:
        headers = {"host": "llm.example", "origin": "https://chat.example", **bearer("secret")}
        assert httpx.get(url + "/v1/models", headers=headers).status_code == 200


def test_a_key_for_some_models_is_told_of_no_others(url, keys, service):
    service.name = "scripted"
    assert httpx.post(url + PATH, json=CHAT).status_code == 200  # so that there is something to measure
    _, text = keys.create("ada", models=["other"], scopes=["models", "metrics"])
    paths = (
        "/metrics",
        "/api/tags",
        "/api/ps",
        "/v1/models",
        "/v1/models/other",
        "/pelton/models",
        "/props?model=other",
    )
    for path in (*paths, "/slots", "/info", "/v1/prefix_cache/pins"):
        answer = httpx.get(url + path, headers=bearer(text))
        assert "scripted" not in answer.text, path
    for path, body in (
        (PATH, {**CHAT, "model": "other"}),
        (PATH, {**CHAT, "model": "alien"}),
        ("/api/show", {"model": "other"}),
        ("/pelton/models/unload", {"model": "other"}),
        ("/tokenize", {"content": "x"}),
    ):
        answer = httpx.post(url + path, json=body, headers=bearer(text))
        assert answer.status_code in (400, 404)
        assert "scripted" not in answer.text, path
    _, text = keys.create("bob", models=["scripted"], scopes=["metrics"])
    assert 'model="scripted"' in httpx.get(url + "/metrics", headers=bearer(text)).text


def test_only_who_may_change_the_models_says_how_long_one_stays(url, keys, pool):
    body = {**CHAT, "stream": False, "keep_alive": 0}
    for scope, told, kept in (("inference", ["keep_alive"], set()), ("models", None, {0.0, math.inf})):
        pool.kept.clear()
        _, text = keys.create(scope, scopes=[scope])
        answer = httpx.post(url + "/api/chat", json=body, headers=bearer(text)).json()
        assert answer.get("ignored_params") == told
        asked = {"model": "scripted", "input": "", "keep_alive": 0}
        answer = httpx.post(url + "/api/embed", json=asked, headers=bearer(text)).json()
        assert answer.get("ignored_params") == told
        answer = httpx.post(url + "/api/generate", json={"model": "scripted", "keep_alive": -1}, headers=bearer(text))
        assert answer.status_code == 200
        assert set(pool.kept) - {None} == kept


@contextlib.contextmanager
def no_room() -> Iterator[None]:
    """No file can grow."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_new_home_on_a_full_disk_serves_without_keys(file, caplog):
    pool, config = ScriptedPool(ScriptedService()), ServerConfig(store=str(file))
    with no_room():
        app = App(pool, config)  # type: ignore[arg-type]
    assert app.keys.is_empty
    assert re.search("keys, the ledger .* and all that is stored .* are off: .*server.sqlite", caplog.text)
    assert not list(file.parent.iterdir())  # the next start finds no half of a store
    app.close()
    App(pool, config).close()  # type: ignore[arg-type]
    assert file.stat().st_size
    file.write_bytes(b"x" * 100)
    with pytest.raises(ConfigError, match="cannot be used"):  # it may have had keys
        App(pool, config)  # type: ignore[arg-type]
