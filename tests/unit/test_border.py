"""The foundation's own promises: cheap imports and settings that say where a bad value came from."""

import subprocess
import sys

import pytest

from pelton import config
from pelton.errors import ConfigError


def test_import_of_pelton_is_light():
    script = "import pelton, sys; print([m for m in ('numpy', 'pelton._core', 'torch') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_settings_come_from_arguments_then_the_environment(monkeypatch):
    monkeypatch.setenv("PELTON_PORT", "9001")
    monkeypatch.setenv("PELTON_THREADS", "3")
    assert config.load().server.port == 9001
    assert config.load(port=9002, threads=None).server.port == 9002
    assert config.load().engine.threads == 3


def test_a_bad_setting_names_its_variable(monkeypatch):
    monkeypatch.setenv("PELTON_PORT", "lots")
    with pytest.raises(ConfigError, match="PELTON_PORT='lots'"):
        config.load()
    with pytest.raises(ConfigError, match="unknown settings: colour"):
        config.load(colour="red")
