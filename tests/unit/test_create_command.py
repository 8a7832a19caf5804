"""`pelton create`: from a model of the store, and from a file."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from pelton import config
from pelton.cli.main import main
from pelton.hub.store import Store
from tests.unit.test_pool_store import put
from tests.unit.vocabularies import write_model


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("PELTON_HOME", str(tmp_path))
    monkeypatch.setenv("PELTON_OFFLINE", "1")
    return Store(config.load().hub)


def create(path: Path, text: str) -> tuple[int, str]:
    path.write_text(text)
    result = CliRunner().invoke(main, ["create", "mario", "-f", str(path)])
    return result.exit_code, result.output


def test_from_a_model(store, tmp_path):
    put(tmp_path, "base")
    code, output = create(tmp_path / "Modelfile", "FROM base:latest\nSYSTEM You are Mario.\nPARAMETER num_gpu 1")
    assert (code, output) == (0, "PARAMETER num_gpu changes nothing here\nmario is made\n")
    made = store.show("mario")
    assert made.files == store.show("base").files
    assert (made.preset.system, made.preset.parent) == ("You are Mario.", "base")


def test_from_a_file(store, tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    write_model(folder / "my model.gguf")
    for _ in range(2):  # the second time its file is there
        assert create(folder / "Modelfile", "FROM ./my model.gguf\nPARAMETER temperature 0.5") == (0, "mario is made\n")
    made = store.show("mario")
    assert made.files[0].name == "my_model.gguf"
    assert store.resolve("mario").read_bytes() == (folder / "my model.gguf").read_bytes()
    assert made.preset.parameters == {"temperature": 0.5}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("FROM base\nADAPTER a", "pelton: Modelfile, line 2: ADAPTER: adapters cannot be run yet"),
        ("FROM base\nTEMPLATE {% if", "pelton: the model's chat template cannot be read"),
        ("FROM ./none.gguf", "none.gguf"),
        ("FROM none", "there is no model named 'none'"),
    ],
)
def test_what_cannot_be_made(store, tmp_path, text, problem):
    code, output = create(tmp_path / "Modelfile", text)
    assert code == 1
    assert problem in output
    assert not store.list()
