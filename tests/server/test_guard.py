"""What stands before every route: keys, scopes, limits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest

from pelton.config import ServerConfig
from pelton.errors import ConfigError
from pelton.server import meter
from pelton.server.app import App
from pelton.server.keys import KeyStore
from pelton.server.ledger import used
from pelton.server.limits import Limits
from pelton.server.listen import Server
from pelton.server.store import Store
from tests.server.guarded import CHAT, MESSAGES, PATH, bearer
from tests.server.scripted import ScriptedPool, ScriptedService, serving, serving_pool


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


def test_an_error_says_little_of_a_huge_input(url):
    response = httpx.post(url + PATH, json={**CHAT, "model": "m" * 100_000})
    assert response.status_code == 404
    assert len(response.content) < 1000
    assert len(json.dumps(httpx.get(url + "/" + "n" * 5000).json())) < 1000


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
