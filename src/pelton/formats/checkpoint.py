"""A model's weights and metadata, whatever the file's format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pelton.formats import gguf
from pelton.formats.digest import ModelFile
from pelton.formats.gguf import Value
from pelton.formats.tensor import Tensor

__all__ = ["Checkpoint", "Tensor", "Value", "open"]


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Metadata and tensors by name (in file order), from one file or all parts of a split model.

    Tensors stay valid as long as they are referred to; the files are mapped, not read, so they must not be cut short
    meanwhile.
    """

    metadata: Mapping[str, Value]
    tensors: Mapping[str, Tensor]
    files: tuple[ModelFile, ...]


def open(path: str | Path) -> Checkpoint:
    """Opens a GGUF file. Raises ModelNotFound, FormatError or UnsupportedModel; all messages name the file."""
    parts = gguf.read(path)
    return Checkpoint(
        metadata=parts[0].metadata,
        tensors={tensor.name: tensor for part in parts for tensor in part.tensors},
        files=tuple(part.file for part in parts),
    )
