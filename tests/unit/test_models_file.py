"""The models file: what it says, and what is wrong with it, to the line."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest

from pelton import config
from pelton.config import EngineConfig
from pelton.errors import ConfigError
from pelton.pool import ModelSpec, read_models_file

GOOD = """\
# ours
[models.assistant]
model = "qwen2.5:0.5b"
aliases = ["gpt-4o-mini", "default"]
preload = true
context = 8192
kv_dtype = "int8"
target_itl = 80
tool_dialect = "hermes"

[models."owner/repo:Q4_K_M"]
keep_alive = "1h"

[models.plain]
"""


def read(tmp_path: Path, text: str, **settings: object) -> list[ModelSpec]:
    path = tmp_path / "models.toml"
    path.write_text(text, encoding="utf-8")
    return read_models_file(path, config.load(home=tmp_path, **settings))


def test_what_it_says(tmp_path: Path) -> None:
    assistant, repo, plain = read(tmp_path, GOOD, threads=3, keep_alive="2m")
    assert (assistant.name, assistant.model, assistant.is_preloaded) == ("assistant", "qwen2.5:0.5b", True)
    assert assistant.aliases == ("gpt-4o-mini", "default")
    assert (assistant.engine.context, assistant.engine.kv_dtype, assistant.engine.threads) == (8192, "int8", 3)
    assert (assistant.engine.target_itl, assistant.text.tool_dialect) == (80.0, "hermes")
    assert assistant.keep_alive == math.inf
    assert (repo.name, repo.model, repo.keep_alive) == ("owner/repo:Q4_K_M", "owner/repo:Q4_K_M", 3600)
    assert (plain.model, plain.keep_alive, plain.engine.threads) == ("plain", 120, 3)


def test_every_setting_of_an_engine_can_be_set(tmp_path: Path) -> None:
    defaults = EngineConfig()
    for field in msgspec.structs.fields(EngineConfig):
        value = getattr(defaults, field.name)
        written = str(value).lower() if isinstance(value, bool) else repr(value).replace("'", '"')
        (spec,) = read(tmp_path, f"[models.m]\n{field.name} = {written}\n")
        assert spec.engine == defaults


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (GOOD + "contxt = 5\n", r"models.toml, line 15, \[models.plain\]: contxt: unknown \(is it context\?\)"),
        ('[models."a b"]\n\n"x y" = 5\n', r"line 3, \[models.a b\]: x y: unknown$"),
        (
            "[models.a]\ncontext = 1\n[models.b]\ncontext = true\n",
            r"line 4, \[models.b\]: context: True: Expected `int`",
        ),
        ('[models.a]\nkeep_alive = "soon"\n', r"line 2, \[models.a\]: keep_alive: 'soon': .* is no time span"),
        ('[models.a]\naliases = "one"\n', r"line 2, \[models.a\]: aliases: 'one': Expected `array`"),
        ('[models.a]\ntool_dialect = "x"\n', r"line 2, \[models.a\]: tool_dialect: 'x': .* must be one of"),
        ("[model.a]\n", r"models.toml, line 1: model: unknown \(is it models\?\)"),
        ("threads = 3\n", r"models.toml, line 1: threads: unknown"),
        ("models = 3\n", r"line 1: models: must be tables"),
        ("[models]\na = 3\n", r"models: a must be a table"),
        ("[models.a\n", r"models.toml: .*line 1"),
        ("[models.a]\nx = 1\nx = 2\n", r"models.toml: .*line 3"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read(tmp_path, text)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        read_models_file(tmp_path / "absent.toml", config.load(home=tmp_path))
