"""The second address, where clients of Ollama look."""

from __future__ import annotations

import asyncio
import threading

import ollama
import pytest

from pelton.config import ServerConfig
from pelton.errors import ConfigError
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


def test_both_addresses_answer():
    server = Server(ScriptedPool(ScriptedService()), ServerConfig(port=0, ollama="127.0.0.1:0"))  # type: ignore[arg-type]
    is_ready = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(server.run(lambda port: is_ready.set())))
    thread.start()
    try:
        assert is_ready.wait(30)
        ports = {bound.getsockname()[1] for bound in server._bound}
        assert len(ports) == 2
        for port in ports:
            client = ollama.Client(host=f"127.0.0.1:{port}")
            assert client.generate("scripted", "Hi").response == "Hello 🦙"
            client.close()
    finally:
        server._uvicorn.should_exit = True
        thread.join()
