"""Where settings come from, and how they are written."""

import math
from pathlib import Path
from typing import get_args

import pytest

from pelton import config
from pelton.cli.options import KV_TYPES
from pelton.errors import ConfigError
from pelton.ops.data import KVType


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    for name in ("HF_ENDPOINT", "HF_HUB_OFFLINE", "PELTON_OFFLINE", "PELTON_HOME", "PELTON_HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)


def test_the_hub_by_default():
    hub = config.load().hub
    assert (hub.offline, hub.hf_endpoint) == (False, "")
    assert hub.home.is_absolute()


def test_the_variables_of_others_are_honoured(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "")
    monkeypatch.setenv("CURL_CA_BUNDLE", "/curl.pem")
    hub = config.load().hub
    assert (hub.offline, hub.hf_endpoint, hub.ca_bundle) == (True, "http://127.0.0.1:9", "/curl.pem")


def test_our_own_variables(monkeypatch):
    monkeypatch.setenv("PELTON_HOME", "/somewhere")
    monkeypatch.setenv("PELTON_OFFLINE", "true")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("PELTON_HF_ENDPOINT", "http://127.0.0.1:10")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/requests.pem")
    monkeypatch.setenv("PELTON_CA_BUNDLE", "/own.pem")
    hub = config.load().hub
    assert (hub.home, hub.offline, hub.hf_endpoint) == (Path("/somewhere"), True, "http://127.0.0.1:10")
    assert hub.ca_bundle == "/own.pem"


def test_what_is_said_comes_before_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("PELTON_HOME", "/somewhere")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    hub = config.load(home=tmp_path, hf_endpoint="http://127.0.0.1:10").hub
    assert (hub.home, hub.hf_endpoint) == (tmp_path, "http://127.0.0.1:10")


def test_the_command_line_offers_every_kv_type():
    assert get_args(KVType) == KV_TYPES


def test_a_path_may_be_given_as_a_string() -> None:
    assert config.load(home="/somewhere").hub.home == Path("/somewhere")
    assert config.load(home=Path("/somewhere")).hub.home == Path("/somewhere")
    with pytest.raises(ConfigError, match="home=3"):
        config.load(home=3)


@pytest.mark.parametrize(
    ("text", "size"), [("8GB", 8 * 10**9), ("1.5g", 15 * 10**8), (" 512 MiB", 512 << 20), ("7k", 7000), ("123", 123)]
)
def test_sizes(monkeypatch: pytest.MonkeyPatch, text: str, size: int) -> None:
    assert config.load(memory_budget=text).pool.memory_budget == size
    monkeypatch.setenv("PELTON_MEMORY_BUDGET", text)
    assert config.load().pool.memory_budget == size
    assert config.load(memory_budget=5).pool.memory_budget == 5


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30), ("1h30m", 5400), ("250ms", 0.25), ("2.5", 2.5), (7, 7), ("0", 0), (-1, math.inf), ("-5m", math.inf)],
)
def test_time_spans(text: str | float, seconds: float) -> None:
    assert config.load(keep_alive=text).pool.keep_alive == seconds


@pytest.mark.parametrize(
    "setting", [{"memory_budget": "lots"}, {"memory_budget": -1}, {"keep_alive": "5 apples"}, {"keep_alive": "nan"}]
)
def test_what_is_no_size_or_time_span(setting: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting))):
        config.load(**setting)
