"""Options and the real models that tests share."""

from __future__ import annotations

import functools
import os
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from pelton.config import HubConfig
from pelton.errors import HubError

MODELS = Path(os.environ.get("PELTON_TEST_MODELS") or "~/.cache/pelton-test-models").expanduser()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run tests marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))


@pytest.fixture(scope="session", autouse=True)
def certificates_read_once() -> Iterator[None]:
    """Each HTTP client reads all certificates there are when it is made: a second for some twenty of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", functools.cache(ssl.create_default_context))
        yield


def real_model(file: str) -> Path:
    """A model file that must have been fetched before; the test is skipped where it was not."""
    path = MODELS / file
    if not path.exists():
        pytest.skip(f"{path} is not here")
    return path


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2 135M Instruct, Q4_1: fetched the way a user fetches it, once, where it is not here yet."""
    path = MODELS / "smollm2-135m-instruct-q4_1.gguf"
    if path.exists():
        return path
    from pelton.hub.pull import pull

    try:
        return pull("smollm2", HubConfig(home=MODELS / "store"))
    except HubError as error:
        pytest.skip(f"SmolLM2 cannot be fetched: {error}")
