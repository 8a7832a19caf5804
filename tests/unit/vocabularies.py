"""Small vocabularies in the form of GGUF metadata, built here so that the tests need no model file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from pelton.formats import gguf
from pelton.text.tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED

CORPUS = (
    """The quick brown fox doesn't jump over 1234567890 lazy dogs; it's what they'd've done.
def encode(text: str) -> list[int]:
    return [ord(c) for c in text if c != " "]  # comment


Der Fluß fließt über 12 Brücken. Les élèves étaient là. Привет, как дела? 你好，世界！ 今日は。 안녕하세요 😀😀👍🏽
"""
    * 3
)

CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level(pre: str = "smollm", *, size: int = 420, **extra: Any) -> dict[str, Any]:
    """A byte-level BPE vocabulary trained on CORPUS: control tokens first, one user-defined token last."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    trained.train_from_iterator(CORPUS.splitlines(keepends=True), trainer)
    model = json.loads(trained.to_str())["model"]
    words = sorted(model["vocab"], key=model["vocab"].__getitem__)
    tokens = [*CHATML, *words, "<tool_call>"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL] * 3 + [NORMAL] * len(words) + [USER_DEFINED],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return metadata | {f"tokenizer.{key.replace('__', '.')}": value for key, value in extra.items()}


SPM_WORDS = [
    "▁",
    "a",
    "b",
    "c",
    "d",
    "e",
    "h",
    "l",
    "o",
    "t",
    "▁t",
    "he",
    "▁the",
    "ab",
    "aa",
    "aaa",
    "▁a",
    "▁▁",
    "▁▁▁",
    "ll",
    "lo",
    "llo",
    "hello",
    "▁hello",
    "th",
    "é",
    "ab▁",
    "▁t▁",
    "o▁",
    "la",
    "lal",
    "al",
    "ca",
    "cab",
]


def sentencepiece(**extra: Any) -> dict[str, Any]:
    """A SentencePiece vocabulary: unknown, begin and end token, 256 bytes, SPM_WORDS by falling score."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *SPM_WORDS, "<b>", "\n\n"]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(SPM_WORDS))] + [0.0, 0.0],
        "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, CONTROL]
        + [BYTE] * 256
        + [NORMAL] * len(SPM_WORDS)
        + [USER_DEFINED] * 2,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return metadata | {f"tokenizer.{key.replace('__', '.')}": value for key, value in extra.items()}


def write_model(path: Path, **extra: Any) -> str:
    """A GGUF file with a vocabulary and no tensors; its path."""
    gguf.write(path, byte_level(**extra) | {"general.architecture": "llama"}, [])
    return str(path)
