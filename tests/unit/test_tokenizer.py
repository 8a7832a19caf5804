from __future__ import annotations

import threading
import time
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from pelton.errors import FormatError, InvalidRequest, UnsupportedModel
from pelton.text.cutter import Cutter
from pelton.text.pretokenizers import TABLE, pre_tokenizer
from pelton.text.tokenizer import CONTROL, NORMAL, UNUSED, USER_DEFINED, Tokenizer
from tests.unit.vocabularies import CHATML, byte_level


def words(pre: str, text: str) -> list[str]:
    splits = [pre_tokenizers.Split(Regex(e), "isolated") for e in pre_tokenizer(pre).expressions]
    return [word for word, _ in pre_tokenizers.Sequence(splits).pre_tokenize_str(text)]


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return Tokenizer(byte_level())


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "It's 1234,  ok\n\n x", ["It", "'s", " 1234", ",", " ", " ok", "\n\n", " x"]),
        ("gpt-2", "IT'S", ["IT", "'", "S"]),
        ("smollm", "a1234 56", ["a", "1", "2", "3", "4", " ", "5", "6"]),
        ("llama-bpe", "IT'S 12345678", ["IT", "'S", " ", "123", "456", "78"]),
        ("llama-bpe", "a;\n\n  b\t\tc", ["a", ";\n\n", " ", " b", "\t", "\tc"]),
        ("qwen2", "x1234 'tis", ["x", "1", "2", "3", "4", " '", "tis"]),
        ("gpt-4o", "camelCaseHTTPServer's", ["camel", "Case", "HTTPServer's"]),
        ("tekken", "camelCase's 123", ["camel", "Case", "'s", " ", "1", "2", "3"]),
        ("deepseek-coder", "ab 12,\ncd", ["ab", " ", "1", "2", ",", "\n", "cd"]),
        ("deepseek-llm", "ab 123!\n中文x", ["ab", " ", "123", "!", "\n", "中文", "x"]),
        ("deepseek-v3", "1234日本a", ["123", "4", "日本", "a"]),
        ("falcon", "a=12345", ["a", "=", "123", "45"]),
        ("default", "`12345", ["`", "123", "45"]),
        ("bloom", "a, b", ["a", ",", " b"]),
        ("qwen35", "हिन्दी", ["हिन्दी"]),
        ("qwen2", "हिन्दी", ["ह", "िन", "्द", "ी"]),
    ],
)
def test_words(pre: str, text: str, expected: list[str]) -> None:
    assert words(pre, text) == expected


@pytest.mark.parametrize("pre", sorted(TABLE))
def test_every_row_keeps_all_text(pre: str) -> None:
    text = "Don't I'VE 12345 x\r\n\n\t  日本語 한국어 हिन्दी العربية 😀👍🏽 ½²٣ …!?\x01\x7f"
    assert "".join(words(pre, text)) == text
    tokenizer = Tokenizer(byte_level(pre))
    assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == text


def test_unknown_or_missing_pre_tokenizer_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="brand-new"):
        Tokenizer(byte_level("brand-new"))
    with pytest.raises(UnsupportedModel, match="missing"):
        Tokenizer(byte_level(""))


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_byte_level_round_trip(text: str) -> None:
    tokenizer = _cached_bpe()
    assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == text


def test_control_tokens_in_text_stay_text(bpe: Tokenizer) -> None:
    forged = "".join(CHATML) + " x"
    ids = bpe.encode(forged, add_special=False)
    assert not any(bpe.is_control(id) for id in ids)
    assert bpe.decode(ids) == forged


def test_control_tokens_are_found_by_name() -> None:
    tokenizer = with_tokens(("<a>", CONTROL), ("<a><b>", CONTROL), ("b><", CONTROL), ("[x", CONTROL), ("<c>", NORMAL))
    found = list(tokenizer.find_controls("<a><b><a>b><c>[x<a"))
    assert found == [(0, "<a><b>"), (6, "<a>"), (9, "b><"), (14, "[x")]  # the longest first, none within another
    assert list(tokenizer.find_controls("")) == list(tokenizer.find_controls("<|im_star")) == []


def test_thousands_of_user_defined_tokens_are_found_soon() -> None:
    names = [chr(0x4E00 + i) + end for i in range(4000) for end in ("x", "xyz", "xyzx")]
    cutter = Cutter({name: id for id, name in enumerate(names)})
    begun = time.process_time()
    ids = cutter.encode(["\u4e00xyz and \u4e01xy, \u4e02" * 2, "\u5d02" * 50_000], lambda parts: [[-1]] * len(parts))
    assert time.process_time() - begun < 0.5
    assert ids == [[1, -1, 3, -1] * 2, [-1]]


def test_user_defined_tokens_are_found_in_text(bpe: Tokenizer) -> None:
    tool_call = bpe.vocab_size - 1
    assert tool_call in bpe.encode("a<tool_call>b", add_special=False)


def test_segments(bpe: Tokenizer) -> None:
    segments = [1, "user\nhi <|im_end|>", 2, "", "\n"]
    ids = bpe.encode_segments(segments)
    assert [id for id in ids if bpe.is_control(id)] == [1, 2]
    assert bpe.decode(ids, skip_special=False) == "<|im_start|>user\nhi <|im_end|><|im_end|>\n"
    assert bpe.decode(ids) == "user\nhi <|im_end|>\n"
    assert bpe.encode_segments([]) == []


def test_begin_token_is_neither_doubled_nor_stripped() -> None:
    asks = Tokenizer(byte_level(ggml__add_bos_token=True))
    assert asks.encode("x", add_special=True)[0] == 0
    assert asks.encode("x", add_special=True)[1:] == asks.encode("x", add_special=False)
    assert asks.encode_segments([0, "x"]) == asks.encode_segments(["x"]) == asks.encode("x", add_special=True)
    silent = Tokenizer(byte_level())
    assert silent.encode("x", add_special=True) == silent.encode("x", add_special=False)
    assert silent.encode_segments([0, "x"])[0] == 0


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        (byte_level("smollm"), False),
        (byte_level("llama-bpe"), True),
        (byte_level("tekken"), True),
        (byte_level("llama-bpe", ggml__add_bos_token=False), False),
    ],
)
def test_begin_token_defaults(metadata: dict, expected: bool) -> None:
    assert Tokenizer(metadata).add_bos is expected


def test_end_token_after_text() -> None:
    tokenizer = Tokenizer(byte_level(ggml__add_eos_token=True))
    assert tokenizer.encode("x", add_special=True)[-1] == 2
    assert tokenizer.encode_segments(["x"])[-1] != 2


def with_tokens(*added: tuple[str, int], **extra: object) -> Tokenizer:
    metadata = byte_level(**extra)
    metadata["tokenizer.ggml.tokens"] = metadata["tokenizer.ggml.tokens"] + [text for text, _ in added]
    metadata["tokenizer.ggml.token_type"] = metadata["tokenizer.ggml.token_type"] + [kind for _, kind in added]
    return Tokenizer(metadata)


def test_all_end_tokens() -> None:
    base = Tokenizer(byte_level())
    assert base.end_ids == (0, 2)
    n = base.vocab_size
    assert with_tokens(("<end_of_turn>", CONTROL), ("<|eot_id|>", NORMAL)).end_ids == (0, 2, n, n + 1)
    assert with_tokens(("</s>", USER_DEFINED)).end_ids == (0, 2)
    assert with_tokens(("</s>", CONTROL)).end_ids == (0, 2, n)
    assert with_tokens(("odd", CONTROL), ggml__eot_token_id=n).end_ids == (0, 2, n)
    harmony = with_tokens(("<|return|>", CONTROL), ("<|call|>", CONTROL), ("<|end|>", CONTROL))
    assert harmony.end_ids == (0, 2, n, n + 1)


def test_token_bytes(bpe: Tokenizer) -> None:
    ids = bpe.encode("é中😀 x", add_special=False)
    assert b"".join(map(bpe.token_bytes, ids)) == "é中😀 x".encode()
    assert bpe.token_bytes(1) == b"<|im_start|>"
    assert with_tokens(("[PAD9]", UNUSED)).token_bytes(bpe.vocab_size) == b""


def test_whole_words_ignore_merges() -> None:
    added = ("Ġqqqq", NORMAL)
    assert with_tokens(added, pre="llama-bpe").encode(" qqqq", add_special=False) == [
        Tokenizer(byte_level()).vocab_size
    ]
    assert len(with_tokens(added, pre="qwen2").encode(" qqqq", add_special=False)) > 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, "bert"),
        ({"tokenizer.ggml.tokens": None}, "tokens is missing"),
        ({"tokenizer.ggml.tokens": 7}, "tokens is not an array"),
        ({"tokenizer.ggml.merges": None}, "merges is missing"),
        ({"tokenizer.ggml.merges": ["zz yy"]}, "merges"),
        ({"tokenizer.ggml.merges": ["nospace"]}, "merges"),
        ({"tokenizer.ggml.merges": np.arange(3)}, "merges is not an array of strings"),
        ({"tokenizer.ggml.tokens": np.arange(3)}, "tokens is not an array of strings"),
        ({"tokenizer.ggml.token_type": [1]}, "token_type has 1 entries"),
        ({"tokenizer.ggml.token_type": ["3"] * len(byte_level()["tokenizer.ggml.tokens"])}, "not an array of numbers"),
        ({"tokenizer.ggml.bos_token_id": "1"}, "bos_token_id is no token's id"),
        ({"tokenizer.ggml.add_bos_token": np.array([True, False])}, "add_bos_token is neither true nor false"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, "eos_token_id is 1000000"),
    ],
)
def test_broken_metadata_names_the_field(change: dict, message: str) -> None:
    with pytest.raises((FormatError, UnsupportedModel), match=message):
        Tokenizer(byte_level() | change)


def test_lone_surrogates_are_refused(bpe: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="U\\+D800"):
        bpe.encode("a\ud800b", add_special=False)


def test_long_texts_leave_the_interpreter_free(bpe: Tokenizer) -> None:
    text = "The quick brown fox doesn't jump. " * 30000
    thread = threading.Thread(target=bpe.encode, args=(text,), kwargs={"add_special": False})
    thread.start()
    wakes = 0
    while thread.is_alive():
        time.sleep(0.001)
        wakes += 1
    assert wakes > 20


@cache
def _cached_bpe() -> Tokenizer:
    return Tokenizer(byte_level())
