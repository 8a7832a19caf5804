"""A scripted model behind a real server; a module whose model or server differs has fixtures of these names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.server.scripted import ScriptedService, client_of, serving


@pytest.fixture
def service() -> ScriptedService:
    return ScriptedService()


@pytest.fixture
def url(service: ScriptedService) -> Iterator[str]:
    with serving(service, max_body=100_000) as address:
        yield address


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "server.sqlite"


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with client_of(url) as each:
        yield each
