"""What the pool tells of models: those that can be served, those that are loaded, those of the store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from pelton.hub.preset import Preset
from pelton.hub.source import Progress


class Loading(msgspec.Struct, frozen=True):
    """A model is being loaded; `share` of it is, 0 to 1."""

    name: str
    share: float


Report = Callable[[Progress | Loading], None]
"""Hears of a pull and then of a load. Called from other threads too."""


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A model that can be served, loaded or not."""

    id: str
    created: int
    """Seconds since 1970: when its file was written."""
    context: int | None = None
    """Tokens; None: not known before it is loaded, since that depends on the memory that there is."""
    weight_bytes: int | None = None
    """Of the weights in memory; None: not loaded."""
    aliases: tuple[str, ...] = ()


State = Literal["waiting", "loading", "ready", "leaving"]
"""waiting: for memory, or for its turn. leaving: it is unloaded as soon as its last request has ended."""


class Resident(msgspec.Struct, frozen=True, kw_only=True):
    """A model that takes memory, or is about to. Times are seconds since 1970."""

    name: str
    model: str
    """What was loaded: a name of the store, or a path."""
    state: State
    share: float
    """Of the load, 0 to 1."""
    num_requests: int
    """In flight; those that wait for the load are among them."""
    expires_at: float | None
    """None: never, or not known while requests are in flight."""
    used_at: float
    """When its last request began or ended."""
    pid: int | None = None
    context: int | None = None
    memory: int = 0
    """Bytes, all that follow and what its process takes beside them."""
    weight_bytes: int = 0
    kv_bytes: int = 0
    arena_bytes: int = 0


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """What all loaded models share, in bytes."""

    budget: int
    used: int
    """As planned, whether it is taken already or not."""


class StoredModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model of the store, from its manifest and its file's own metadata."""

    name: str
    source: str
    """Where it came from."""
    size: int
    """Bytes of its files."""
    digest: str
    """SHA-256 of the whole model."""
    modified_at: float
    """Seconds since 1970."""
    format: str = "gguf"
    family: str
    """The architecture, as the file calls it."""
    parameters: int
    quantization: str
    """As files are named for it: Q4_K_M."""
    context: int | None
    """What it was trained for, in tokens."""
    has_chat_template: bool
    license: str | None
    capabilities: tuple[str, ...] = ()
    """In Ollama's words: completion, tools, thinking, insert."""
    preset: Preset | None = None
    """What its name brings along besides its files."""
    problem: str | None = None
    """Why it cannot be served, where that can be seen."""
