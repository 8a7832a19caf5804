"""A draft model must mean the same by each token id: else an error says what differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pelton.engine.same_vocabulary import Vocabulary, check_same_vocabulary
from pelton.errors import ConfigError
from pelton.formats.checkpoint import Checkpoint

METADATA: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.tokens": ["a", "b", "ab"],
    "tokenizer.ggml.merges": ["a b"],
    "general.name": "one",
}


def vocabulary(name: str, size: int = 3, **changes: Any) -> Vocabulary:
    metadata = METADATA | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    kept = {key: value for key, value in metadata.items() if value is not None}
    return Vocabulary(Path(f"{name}.gguf"), Checkpoint(kept, {}, ()), size)


def test_the_same_are_accepted():
    check_same_vocabulary(vocabulary("target"), vocabulary("draft"))
    scores = {"merges": None, "scores": np.zeros(3, np.float32)}
    check_same_vocabulary(vocabulary("target", **scores), vocabulary("draft", **scores))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model": "llama"}, "tokenizer.ggml.model is 'llama', not 'gpt2'"),
        ({"pre": None}, "tokenizer.ggml.pre is None, not 'qwen2'"),
        ({"tokens": ["a", "c", "ab"]}, "tokenizer.ggml.tokens has 'c' at 1, not 'b'"),
        ({"tokens": ["a", "b"]}, "tokenizer.ggml.tokens has 2 entries, not 3"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"size": 2}, "2 tokens, not 3"),
    ],
)
def test_what_differs_is_told(changes: dict[str, Any], expected: str):
    with pytest.raises(ConfigError) as caught:
        check_same_vocabulary(vocabulary("target"), vocabulary("draft", **changes))
    assert caught.value.message.startswith("draft.gguf cannot draft for target.gguf")
    assert expected in caught.value.message
    assert caught.value.param == "draft_model"


def test_scores_count_where_there_are_no_merges():
    ours, theirs = np.zeros(3, np.float32), np.array([0, 0, 1], np.float32)
    with pytest.raises(ConfigError, match=r"tokenizer.ggml.scores has 1.0 at 2, not 0.0"):
        check_same_vocabulary(
            vocabulary("target", merges=None, scores=ours), vocabulary("draft", merges=None, scores=theirs)
        )
