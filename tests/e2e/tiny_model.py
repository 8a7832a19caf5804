"""Tiny random models with a vocabulary and a chat template: whole, and as fast as nothing real is."""

from __future__ import annotations

from pathlib import Path

from pelton.formats.quants import WeightType
from tests.models import convert, tiny
from tests.unit.chat_templates import CHATML
from tests.unit.vocabularies import byte_level

CASES = {"llama": ("llama", {}), "windows": ("gemma3", {"sliding_window": 100})}
METADATA = byte_level(chat_template=CHATML)
END = 2
"""The token that ends a turn."""


def write(folder: Path, case: str) -> Path:
    """The model file of one of CASES."""
    config, changes = CASES[case]
    sizes = {"max_position_embeddings": 1024, "vocab_size": len(METADATA["tokenizer.ggml.tokens"])}
    path = folder / f"{case}.gguf"
    convert.write(
        tiny.build(config, **changes, **sizes), path, lambda name, shape: WeightType.Q8_0, vocabulary=METADATA
    )
    return path
