"""Pelton: one engine for large language models, from a laptop to a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pelton.llm import LLM as LLM
    from pelton.request import SamplingParams as SamplingParams

__version__ = "0.1.0"

__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """`LLM` and `SamplingParams`, imported when they are first used."""
    if name == "LLM":
        from pelton.llm import LLM

        return LLM
    if name == "SamplingParams":
        from pelton.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'pelton' has no attribute {name!r}")
