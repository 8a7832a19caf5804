"""What is embedded of a text, and what becomes of its vector."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pelton.embedding import finished, pooling_of, read
from pelton.errors import ContextLengthExceeded, InvalidRequest
from pelton.request import EmbeddingParams, Request, Truncation
from pelton.text.tokenizer import Tokenizer
from tests.unit.vocabularies import byte_level

CONTEXT = 40


def model(**extra: Any) -> Any:
    tokenizer = Tokenizer(byte_level() | extra)
    return SimpleNamespace(tokenizer=tokenizer, context=CONTEXT, vocab_size=tokenizer.vocab_size)


def request(**fields: Any) -> Request:
    return Request(id="r", model="m", **fields)


def test_what_the_file_says_holds():
    file = {"general.architecture": "qwen3", "qwen3.pooling_type": 3}
    assert pooling_of(file, None, "mean") == pooling_of(file, "last", None) == "last"
    with pytest.raises(InvalidRequest, match="'mean', but this model is made for 'last'"):
        pooling_of(file, "mean", None)
    silent = {"general.architecture": "qwen3", "qwen3.pooling_type": 0}
    assert pooling_of(silent, "cls", "mean") == "cls"
    assert pooling_of(silent, None, "mean") == "mean"
    assert pooling_of({}, None, None) == "last"
    with pytest.raises(InvalidRequest, match="cannot embed"):
        pooling_of({"general.architecture": "qwen3", "qwen3.pooling_type": 4}, None, None)


def test_a_text_is_whole_or_refused():
    here = model()
    ids = here.tokenizer.encode("a lazy dog", add_special=True)
    assert (
        read(here, request(prompt="a lazy dog"), None) == read(here, request(prompt_ids=tuple(ids)), None) == (ids, ())
    )
    assert read(here, request(prompt_ids=(5,) * CONTEXT), None).ids == [5] * CONTEXT
    for fields in ({"prompt_ids": (5,) * (CONTEXT + 1)}, {"prompt": "z " * CONTEXT}):
        with pytest.raises(ContextLengthExceeded, match=rf"the input has \d+ tokens, .* is {CONTEXT} tokens"):
            read(here, request(**fields), None)
    with pytest.raises(ContextLengthExceeded, match="at least"):
        read(here, request(prompt="z " * 100_000), None)
    for fields in ({"prompt": ""}, {"prompt_ids": ()}):
        with pytest.raises(InvalidRequest, match="empty"):
            read(here, request(**fields), None)


@pytest.mark.parametrize("limit", [None, 7])
def test_a_text_is_cut_openly(limit: int | None):
    here, kept = model(), limit or CONTEXT
    ids = tuple(range(5, 105))
    start = read(here, request(prompt_ids=ids), Truncation(limit=limit))
    end = read(here, request(prompt_ids=ids), Truncation(limit=limit, keeps="end"))
    assert (start.ids, end.ids) == (list(ids[:kept]), list(ids[-kept:]))
    assert start.warnings == (f"cut to {kept} of 100 tokens; the start was kept",)
    assert read(here, request(prompt_ids=ids[:5]), Truncation(limit=limit)) == (list(ids[:5]), ())


def test_the_end_token_stays_at_the_end():
    here = model(**{"tokenizer.ggml.add_eos_token": True})
    text = "z " * 100
    whole = here.tokenizer.encode(text, add_special=True)
    assert whole[-1] == here.tokenizer.eos_id
    assert read(here, request(prompt=text), Truncation()).ids == [*whole[: CONTEXT - 1], whole[-1]]
    assert read(here, request(prompt=text), Truncation(limit=3, keeps="end")).ids == whole[-3:]


@pytest.mark.parametrize("keeps", ["start", "end"])
def test_of_a_huge_text_only_what_may_stay_is_encoded(keeps: Any):
    here, text = model(), "".join(f"word{i} " for i in range(30_000))
    whole = here.tokenizer.encode(text, add_special=True)
    lengths: list[int] = []

    def encode(text: str, *, add_special: bool) -> list[int]:
        lengths.append(len(text))
        return Tokenizer.encode(here.tokenizer, text, add_special=add_special)

    here.tokenizer.encode = encode
    cut = read(here, request(prompt=text), Truncation(keeps=keeps))
    assert cut.ids == (whole[:CONTEXT] if keeps == "start" else whole[-CONTEXT:])
    assert "at least" in cut.warnings[0]
    assert lengths[0] < 10_000


def test_a_vector_is_cut_and_normalised():
    raw = np.array([3.0, 4.0, 12.0], "<f4")
    as_asked = lambda **params: np.frombuffer(finished(raw.tobytes(), EmbeddingParams(**params)), "<f4")  # noqa: E731
    assert as_asked(is_normalized=False).tolist() == [3, 4, 12]
    np.testing.assert_array_equal(as_asked(), (raw.astype(float) / 13).astype("<f4"))
    np.testing.assert_array_equal(as_asked(dimensions=2), np.array([0.6, 0.8], "<f4"))
    assert as_asked(is_normalized=False, dimensions=1).tolist() == [3]
    assert math.hypot(*as_asked()) == pytest.approx(1)
    zeros = finished(bytes(8), EmbeddingParams())
    assert zeros == bytes(8)
