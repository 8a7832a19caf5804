"""Pelton: one engine for large language models, from a laptop to a cluster."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pelton.llm import LLM as LLM
    from pelton.request import SamplingParams as SamplingParams

__version__ = "0.1.0"

__all__ = ["LLM", "SamplingParams", "__version__"]

_HOMES = {"LLM": "pelton.llm", "SamplingParams": "pelton.request"}


def __getattr__(name: str) -> Any:
    """What users import from here is imported from its home when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'pelton' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
