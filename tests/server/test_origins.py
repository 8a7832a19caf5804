"""What stands before every route: whose pages may use a server."""

from __future__ import annotations

import json
import re

import httpx2 as httpx
import pytest

from pelton.config import load
from tests.server.guarded import CHAT, PATH, bearer
from tests.server.scripted import serving

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


def test_origins_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("PELTON_CORS_ORIGIN", "https://a.example, https://b.example")
    monkeypatch.setenv("PELTON_HOME", str(tmp_path))
    settings = load().server
    assert settings.cors_origin == ("https://a.example", "https://b.example")
    assert settings.store == str(tmp_path / "server.sqlite")
    assert load(cors_origin=("*",)).server.cors_origin == ("*",)


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
