"""A draft model must have its target's vocabulary: a token id has to mean the same text to both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pelton.errors import ConfigError
from pelton.formats.checkpoint import Checkpoint

KINDS = ("tokenizer.ggml.model", "tokenizer.ggml.pre")
TOKENS, MERGES, SCORES = "tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.scores"
"""Where there are no merges, the scores decide how a text is cut."""


class Vocabulary(NamedTuple):
    """A model's file, what it holds, and how many tokens can be drawn."""

    path: Path
    checkpoint: Checkpoint
    size: int


def check_same_vocabulary(target: Vocabulary, draft: Vocabulary) -> None:
    """Raise `ConfigError`, which says what differs, unless both cut a text into the same ids."""
    difference = _difference(target.checkpoint, draft.checkpoint)
    if difference is None and target.size != draft.size:
        difference = f"{draft.size} tokens, not {target.size}"
    if difference is not None:
        raise ConfigError(
            f"{draft.path.name} cannot draft for {target.path.name}: they have different vocabularies: {difference}",
            param="draft_model",
        )


def _difference(target: Checkpoint, draft: Checkpoint) -> str | None:
    for key in KINDS:
        ours, theirs = target.metadata.get(key), draft.metadata.get(key)
        if ours != theirs:
            return f"{key} is {theirs!r}, not {ours!r}"
    for key in (TOKENS, MERGES if MERGES in target.metadata else SCORES):
        found = _first_difference(target.metadata.get(key), draft.metadata.get(key))
        if found is not None:
            return f"{key} {found}"
    return None


def _first_difference(ours: Any, theirs: Any) -> str | None:
    if (ours is None) != (theirs is None):
        return f"is {'missing' if theirs is None else 'there'}, which it is not in the target"
    if ours is None or _is_same(ours, theirs):
        return None
    pairs = enumerate(zip(ours, theirs, strict=False))
    place = next((place for place, (one, other) in pairs if one != other), None)
    if place is None:
        return f"has {len(theirs)} entries, not {len(ours)}"
    return f"has {_item(theirs, place)!r} at {place}, not {_item(ours, place)!r}"


def _is_same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, np.ndarray) or isinstance(theirs, np.ndarray):
        return np.array_equal(ours, theirs)
    return bool(ours == theirs)


def _item(values: Sequence[Any], place: int) -> Any:
    value = values[place]
    return value.item() if isinstance(value, np.generic) else value
