"""The models file: names of models, and settings of each.

[models.assistant]                  what clients call it
model = "qwen2.5:0.5b"              what is loaded; without it, the name itself
aliases = ["gpt-4o-mini"]           what clients call it, too
preload = true                      load it when the server starts
keep_alive = "1h"                   how long it stays unused
context = 8192                      any setting of an engine, by its name in `config`
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from pelton import config
from pelton.config import Config, EngineConfig, Seconds, TextConfig
from pelton.errors import ConfigError
from pelton.pool.spec import ModelSpec


class _Entry(msgspec.Struct, frozen=True, kw_only=True):
    """What a table says beside the engine's settings."""

    model: str | None = None
    aliases: tuple[str, ...] = ()
    preload: bool = False
    keep_alive: Seconds | None = None


SECTIONS = (_Entry, EngineConfig, TextConfig)


def read(path: Path, settings: Config) -> list[ModelSpec]:
    """The models of a file; what it does not set of them is as in `settings`. Raises `ConfigError`, which names the
    file, the line, the table and the key."""
    try:
        text = path.read_text(encoding="utf-8")
        tables = tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}", param="models_file") from None
    file = _File(path, text)
    for key in tables:
        if key != "models":
            raise file.error("", key, f"unknown{_hint(key, ['models'])}; models stand in tables [models.NAME]")
    models = tables.get("models", {})
    if not isinstance(models, dict):
        raise file.error("", "models", "must be tables: [models.NAME]")
    return [_spec(file, name, table, settings) for name, table in models.items()]


class _File:
    """For errors: where things stand."""

    def __init__(self, path: Path, text: str) -> None:
        self._path = path
        self._lines = text.splitlines()

    def error(self, table: str, key: str, problem: str) -> ConfigError:
        """A key's error. `table`: the model's name; "": none."""
        inside = f", [models.{table}]" if table else ""
        return ConfigError(f"{self._path}{self._line(table, key)}{inside}: {key}: {problem}", param="models_file")

    def _line(self, table: str, key: str) -> str:
        """ ", line N" of the first key of that name behind the table's header, where it is written plainly."""
        is_inside = not table
        for number, line in enumerate(self._lines, start=1):
            if header := re.match(r"\s*\[+([^\]]*)\]", line):
                is_inside = (
                    _plain(header[1]) == _plain(f"models.{table}") if table else _plain(header[1]).startswith(key)
                )
                if is_inside and not table:
                    return f", line {number}"
            elif is_inside and re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*=", line):
                return f", line {number}"
        return ""


def _plain(header: str) -> str:
    return re.sub(r"[\"'\s]", "", header)


def _hint(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    return f" (is it {near[0]}?)" if near else ""


def _spec(file: _File, name: str, table: Any, settings: Config) -> ModelSpec:
    if not isinstance(table, dict):
        raise file.error("", "models", f"{name} must be a table: [models.{name}]")
    known = [field.name for section in SECTIONS for field in msgspec.structs.fields(section)]
    for key in table:
        if key not in known:
            raise file.error(name, key, f"unknown{_hint(key, known)}")

    def take(section: msgspec.Struct) -> Any:
        names = {field.name for field in msgspec.structs.fields(section)}
        given = {key: value for key, value in table.items() if key in names}
        try:
            return config.override(section, given)
        except ConfigError as error:
            raise file.error(name, error.param or "?", error.message) from None

    entry: _Entry = take(_Entry())
    default = math.inf if entry.preload else settings.pool.keep_alive
    return ModelSpec(
        name=name,
        model=entry.model or name,
        aliases=entry.aliases,
        engine=take(settings.engine),
        text=take(settings.text),
        keep_alive=default if entry.keep_alive is None else entry.keep_alive,
        is_preloaded=entry.preload,
    )
