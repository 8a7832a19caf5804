"""The library `tokenizers` has the definition: with the same vocabulary, merges and expressions, the same ids."""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from pelton.errors import FormatError
from pelton.formats import gguf
from pelton.text.pretokenizers import TABLE
from pelton.text.tokenizer import CONTROL, NORMAL, UNUSED, USER_DEFINED, Tokenizer
from tests.unit.vocabularies import CORPUS, byte_level

NASTY = (
    "\u0000\u0004a\u00a0\u3000 \r\n\t\n \u2028x",
    "ﬁ ŉ İ ß ẞ e\u0301\u0302 \u0915\u094d\u0937 👩‍👩‍👧‍👦 \U0010ffff \ufffd\ufeff",
    "<|im_start|><tool_call><tool_call>x<tool_call",
    "0123456789 1.5e-3 0x1F",
    "aaaaaaaaaaaaaaaaa      \n\n\n\n   don't DON'T 'ſ 'll'VE",
)


def library(metadata: dict[str, Any]) -> Library:
    """A byte-level vocabulary as that library runs it."""
    row = TABLE[metadata["tokenizer.ggml.pre"]]
    texts, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    model = models.BPE(
        vocab={text: id for id, text in enumerate(texts) if types[id] not in (CONTROL, UNUSED) and text},
        merges=[tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]],
        ignore_merges=row.ignores_merges,
    )
    made = Library(model)
    splits = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in row.expressions]
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.add_tokens(
        [AddedToken(texts[id], normalized=False) for id, type in enumerate(types) if type == USER_DEFINED and texts[id]]
    )
    return made


def check(metadata: dict[str, Any], texts: list[str]) -> None:
    ours, theirs = Tokenizer(metadata), library(metadata)
    for text in texts:
        assert ours.encode(text, add_special=False) == theirs.encode(text, add_special_tokens=False).ids, text


@pytest.mark.parametrize("pre", sorted(TABLE))
def test_every_way_to_cut_words(pre: str) -> None:
    check(byte_level(pre), [CORPUS, *NASTY])


def test_a_library_of_code() -> None:
    folder = Path(sysconfig.get_paths()["stdlib"])
    names = ("inspect.py", "html/entities.py", "unicodedata.py", "test/test_unicode_identifiers.py", "textwrap.py")
    texts = [(folder / name).read_text("utf-8") for name in names if (folder / name).exists()]
    check(byte_level("qwen2", size=900), texts)


METADATA = byte_level("qwen2")
METADATA["tokenizer.ggml.tokens"] += ["<a>", "<a>b", "  "]
METADATA["tokenizer.ggml.token_type"] += [USER_DEFINED] * 3
OURS, THEIRS = Tokenizer(METADATA), library(METADATA)


@given(st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from("<a>b \nthe'1")), max_size=60))
@settings(max_examples=300)
def test_any_text(text: str) -> None:
    assert OURS.encode(text, add_special=False) == THEIRS.encode(text, add_special_tokens=False).ids


def random_merges(seed: int) -> dict[str, Any]:
    """Merges that no training gives: some twice, tokens that come from several pairs, unions before their parts."""
    rng = random.Random(seed)
    tokens = sorted({"".join(rng.choices("abĠ", k=rng.choice((1, 2, 2, 3, 3, 4, 5)))) for _ in range(60)} | set("abĠ"))
    known = set(tokens)
    pairs = [f"{t[:i]} {t[i:]}" for t in tokens for i in range(1, len(t)) if {t[:i], t[i:]} <= known]
    merges = rng.choices(pairs, k=2 * len(pairs))
    kinds = [NORMAL] * len(tokens)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": rng.choice(("gpt-2", "llama-bpe")),
        "tokenizer.ggml.tokens": ["", *tokens, "", "<end>"],
        "tokenizer.ggml.token_type": [NORMAL, *kinds, UNUSED, CONTROL],
        "tokenizer.ggml.merges": merges,
    }


@pytest.mark.parametrize("seed", range(30))
def test_any_merges(seed: int) -> None:
    rng = random.Random(seed)
    check(random_merges(seed), ["".join(rng.choices("aaabbb c", k=length)) for length in (1, 2, 3, 5, 9, 30, 300)])


def write(path: Path, tokens: list[str], merges: list[str], bad: bytes = b"") -> str:
    """A file with these tokens, in which `bad` stands for '????'."""
    metadata = byte_level() | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": merges}
    metadata["tokenizer.ggml.token_type"] = [NORMAL] * len(tokens)
    gguf.write(path, metadata, [])
    path.write_bytes(path.read_bytes().replace(b"????", bad or b"????"))
    return str(path)


@pytest.mark.parametrize(
    ("tokens", "merges", "bad", "message"),
    [
        (["a", "b", "????"], [], b"x\xed\xa0\x80", r"tokens'\[2\] is not UTF-8"),
        (["a", "b", "????"], [], b"x\xf0\x80\x80", r"tokens'\[2\] is not UTF-8"),
        (["a", "b", "????"], [], b"\xf4\x90\x80\x80", r"tokens'\[2\] is not UTF-8"),
        (["a", "b", "????"], [], b"abc\xc3", r"tokens'\[2\] is not UTF-8"),
        (["a", "b", "a"], [], b"", "tokens': two tokens have the same text"),
        (["a", "b", "ab"], ["a b", "a c"], b"", r"merges'\[1\]"),
        (["a", "b", "ab"], ["a b", "b a"], b"", r"merges'\[1\]"),
        (["a", "b", "ab"], ["ab"], b"", r"merges'\[0\] is no pair"),
    ],
)
def test_broken_vocabularies(tmp_path: Path, tokens: list[str], merges: list[str], bad: bytes, message: str) -> None:
    part = gguf.read(write(tmp_path / "m.gguf", tokens, merges, bad))[0]
    with pytest.raises(FormatError, match=message):
        Tokenizer(part.metadata)


def test_good_utf8_is_taken(tmp_path: Path) -> None:
    tokens = ["a", "\u0080\u07ff\u0800\ud7ff\ue000\uffff", "\U00010000\U0010ffff", "x" * 300]
    part = gguf.read(write(tmp_path / "m.gguf", tokens, []))[0]
    tokenizer = Tokenizer(part.metadata)
    assert [tokenizer.token_text(id) for id in range(4)] == tokens
    assert tokenizer.max_token_length == 300
