"""What stands before every route: bounds on what is sent."""

from __future__ import annotations

import json
import re
import socket
import time
from urllib.parse import urlsplit

import httpx2 as httpx

from tests.server.guarded import CHAT, PATH
from tests.server.scripted import serving


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
