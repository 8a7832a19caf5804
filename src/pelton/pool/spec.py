"""What a server calls a model, and how it runs it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

from pelton.config import EngineConfig, TextConfig
from pelton.errors import ConfigError, ModelNotFound
from pelton.hub import catalogue


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A model that may be loaded. Clients call it `name`, or one of its aliases."""

    name: str
    model: str
    """What is loaded: a catalogue's name, a hub's name, one of the store, or the path of a file."""
    engine: EngineConfig
    text: TextConfig = TextConfig()
    aliases: tuple[str, ...] = ()
    keep_alive: float = math.inf
    """Seconds after the last request until it is unloaded, where that request does not say; inf: for ever."""
    is_preloaded: bool = False
    """Is it loaded when the server starts?"""


def key(name: str) -> str:
    """The same for all ways to write one name. What cannot be a name is its own key: a path is."""
    try:
        return catalogue.canonical(name)
    except ModelNotFound:
        return name


class Names:
    """The models that have a name beside those of the store."""

    def __init__(self, specs: Iterable[ModelSpec] = ()) -> None:
        self._specs: dict[str, ModelSpec] = {}
        for spec in specs:
            self.add(spec)

    def add(self, spec: ModelSpec) -> None:
        """Raises `ConfigError` where another model has one of the names."""
        for name in (spec.name, *spec.aliases):
            other = self._specs.setdefault(key(name), spec)
            if other is not spec:
                raise ConfigError(f"two models are named {name!r}: {other.model} and {spec.model}", param="model")

    def find(self, name: str) -> ModelSpec | None:
        """The model of that name, however it is written."""
        return self._specs.get(name) or self._specs.get(key(name))

    def all(self) -> Sequence[ModelSpec]:
        """Every model once, by name."""
        return sorted({spec.name: spec for spec in self._specs.values()}.values(), key=lambda spec: spec.name)
