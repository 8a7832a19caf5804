"""Reading a checkpoint's metadata: every value checked as it is read, every complaint naming file and key."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from pelton.errors import FormatError, UnsupportedModel
from pelton.formats.checkpoint import Checkpoint

_UNSUPPORTED = (
    "attention.max_alibi_bias",
    "attention.clamp_kqv",
    "attn_logit_softcapping",
    "logit_scale",
    "residual_scale",
    "embedding_scale",
    "attention.temperature_scale",
    "use_parallel_residual",
)
"""Keys under the architecture's prefix that change the computation in ways no family here has."""


class Metadata:
    """The keys under `general.architecture`'s prefix.

    Accessors take the key without the prefix. A missing key without a default, a value of another type, outside
    its bounds or not finite is a FormatError.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.file = Path(checkpoint.files[0].path).name
        architecture = checkpoint.metadata.get("general.architecture")
        if not isinstance(architecture, str):
            raise FormatError(f"{self.file}: metadata has no text 'general.architecture'")
        self.architecture = architecture
        for key in _UNSUPPORTED:
            if self._find(key):
                raise UnsupportedModel(f"{self.file}: models with {architecture}.{key} are not supported")
        if self._find("attention.causal") is False:
            raise UnsupportedModel(f"{self.file}: models without causal attention are not supported")

    def _find(self, key: str) -> object:
        return self.checkpoint.metadata.get(f"{self.architecture}.{key}")

    def has(self, key: str) -> bool:
        """Whether the file states the key."""
        return self._find(key) is not None

    def wrong(self, key: str, problem: str) -> FormatError:
        """The error that says what is wrong with a key."""
        return FormatError(f"{self.file}: {self.architecture}.{key} {problem}")

    def _one(self, key: str) -> object:
        """The value; of an array with one value per layer, that value where all are equal."""
        value = self._find(key)
        if isinstance(value, np.ndarray):
            if value.size and (value == value[0]).all():
                return value[0].item()
            raise UnsupportedModel(f"{self.file}: {self.architecture}.{key} differs between layers: not supported")
        return value

    def integer(self, key: str, *, low: int = 1, high: int, default: int | None = None) -> int:
        """A whole number in low..high."""
        value = self._one(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise self.wrong(key, "is missing")
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.wrong(key, f"is {value!r}, not a whole number")
        if not low <= value <= high:
            raise self.wrong(key, f"is {value}, outside {low} to {high}")
        return value

    def number(self, key: str, *, low: float, high: float, default: float | None = None) -> float:
        """A finite number in low..high."""
        value = self._one(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise self.wrong(key, "is missing")
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
            raise self.wrong(key, f"is {value!r}, not a finite number")
        if not low <= value <= high:
            raise self.wrong(key, f"is {value}, outside {low} to {high}")
        return float(value)

    def text(self, key: str, *, default: str) -> str:
        """A string."""
        value = self._find(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong(key, f"is {value!r}, not text")
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        """True or false."""
        value = self._find(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, f"is {value!r}, not true or false")
        return value

    def flags(self, key: str, count: int) -> tuple[bool, ...] | None:
        """One truth value per layer, where the key is an array."""
        value = self._find(key)
        if not isinstance(value, np.ndarray):
            return None
        if value.shape != (count,):
            raise self.wrong(key, f"has {value.size} entries for {count} layers")
        return tuple(bool(v) for v in value)
