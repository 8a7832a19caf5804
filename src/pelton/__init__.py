"""Pelton: one engine for large language models, from a laptop to a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from pelton.llm import LLM
    from pelton.request import SamplingParams


def __getattr__(name: str) -> Any:
    """Load the public names on first use: `import pelton` stays cheap and never loads the compiled core."""
    if name == "LLM":
        from pelton.llm import LLM

        return LLM
    if name == "SamplingParams":
        from pelton.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'pelton' has no attribute {name!r}")
