"""The second address, where clients of Ollama look."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

import ollama
import pytest

from pelton import logs
from pelton.config import ServerConfig
from pelton.errors import ConfigError
from pelton.server import listen
from pelton.server.acceptor import max_connections, raise_file_limit
from pelton.server.listen import Server, addresses
from tests.server.scripted import ScriptedPool, ScriptedService


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:11434", "127.0.0.1", 11434),
        ("0.0.0.0", "0.0.0.0", 11434),
        (":5", "127.0.0.1", 5),
        ("http://box:80/", "box", 80),
        ("[::1]:7", "::1", 7),
        ("[::1]", "::1", 11434),
    ],
)
def test_addresses_as_ollama_has_them(text, host, port):
    own, other = addresses(ServerConfig(ollama=text))
    assert (own.host, own.port) == ("127.0.0.1", 8000)
    assert (other.host, other.port) == (host, port)


@pytest.mark.parametrize("text", ["host:many", "127.0.0.1:99999", "ftp://a", "a/b", "me@host"])
def test_what_is_no_address(text):
    with pytest.raises(ConfigError, match="is no address"):
        addresses(ServerConfig(ollama=text))


@contextlib.contextmanager
def running(**settings: Any) -> Iterator[Server]:
    server = Server(ScriptedPool(ScriptedService()), ServerConfig(port=0, **settings))  # type: ignore[arg-type]
    is_ready = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(server.run(lambda port: is_ready.set())))
    thread.start()
    try:
        assert is_ready.wait(30)
        yield server
    finally:
        server._uvicorn.should_exit = True
        thread.join()


def test_both_addresses_answer():
    with running(ollama="127.0.0.1:0") as server:
        ports = {bound.getsockname()[1] for bound in server._bound}
        assert len(ports) == 2
        for port in ports:
            client = ollama.Client(host=f"127.0.0.1:{port}")
            assert client.generate("scripted", "Hi").response == "Hello 🦙"
            client.close()


def ask(connection: socket.socket) -> bytes:
    connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    return answer(connection)


def answer(connection: socket.socket) -> bytes:
    said = b""
    while not said.endswith(b"}"):
        more = connection.recv(1000)
        assert more
        said += more
    return said


def test_no_more_connections_are_taken_than_there_may_be(caplog):
    with running(max_connections=2) as server, contextlib.ExitStack() as stack:
        address = server._bound[0].getsockname()

        def connect() -> socket.socket:
            return stack.enter_context(socket.create_connection(address, timeout=0.5))

        first, second = connect(), connect()
        assert ask(first).startswith(b"HTTP/1.1 200")
        assert ask(second).startswith(b"HTTP/1.1 200")
        third = connect()  # the system has it, the server has not
        with pytest.raises(TimeoutError):
            ask(third)
        assert ask(first).startswith(b"HTTP/1.1 200")  # who is there goes on
        first.close()
        third.settimeout(10)
        assert answer(third).startswith(b"HTTP/1.1 200")
    assert [record.message for record in caplog.records if record.name == "pelton.server"] == [
        "2 connections are open, as many as may be (--max-connections): new ones wait"
    ]


def test_without_file_descriptors_new_connections_wait_and_the_log_stays_short(caplog, monkeypatch):
    accept = asyncio.selector_events.BaseSelectorEventLoop.sock_accept
    failures = [OSError(errno.EMFILE, "Too many open files")] * 3

    async def failing(self: Any, listener: socket.socket) -> Any:
        if failures:
            raise failures.pop()
        return await accept(self, listener)

    monkeypatch.setattr(asyncio.selector_events.BaseSelectorEventLoop, "sock_accept", failing)
    with running() as server, socket.create_connection(server._bound[0].getsockname(), timeout=10) as connection:
        assert ask(connection).startswith(b"HTTP/1.1 200")
    assert not failures
    assert len([record for record in caplog.records if "Too many open files" in record.message]) == 1


def test_how_many_connections_there_may_be():
    assert raise_file_limit() == min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 65536)
    assert max_connections(0, 1024) == 896
    assert max_connections(10, 1024) == 10
    assert max_connections(5000, 1024) == 896
    assert max_connections(0, 64) == 32


def test_a_signal_is_no_requests(monkeypatch):
    told: list[str] = []
    monkeypatch.setattr(listen.log, "warning", lambda *_: told.append(logs.request_id.get()))

    async def run() -> None:
        pool = ScriptedPool(ScriptedService())
        server = Server(pool, ServerConfig(port=0))  # type: ignore[arg-type]
        serving = asyncio.ensure_future(server.run())
        while not server._uvicorn.started:
            await asyncio.sleep(0.01)
        logs.request_id.set("somebody's")
        server._uvicorn.handle_exit(signal.SIGTERM, None)
        await serving
        assert pool.is_closed

    asyncio.run(run())
    assert told == [""]
