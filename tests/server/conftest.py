"""A scripted model behind a real server; a module whose model or server differs has fixtures of these names."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.scripted import ScriptedService, serving


@pytest.fixture
def service() -> ScriptedService:
    return ScriptedService()


@pytest.fixture
def url(service: ScriptedService) -> Iterator[str]:
    with serving(service, max_body=100_000) as address:
        yield address
