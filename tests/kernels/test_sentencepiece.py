from __future__ import annotations

import itertools
import random
import threading
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pelton.errors import FormatError, InvalidRequest, UnsupportedModel
from pelton.text.tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Tokenizer
from tests.unit.vocabularies import SPM_WORDS, sentencepiece


@pytest.fixture(scope="module")
def spm() -> Tokenizer:
    return Tokenizer(sentencepiece())


def definition(text: str, metadata: dict[str, Any]) -> list[int]:
    """Always join the two neighbouring tokens whose union is the normal token of the best score. Of equal scores the
    lowest id is first, of one token's splits that of the lowest ids, of equal splits the leftmost."""
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    scores = metadata["tokenizer.ggml.scores"]
    known = {token: id for id, token in enumerate(tokens) if types[id] in (NORMAL, USER_DEFINED)}
    symbols = list(("▁" + text.replace(" ", "▁")) if text else "")
    while True:
        pairs = []
        for i, (left, right) in enumerate(itertools.pairwise(symbols)):
            id = known.get(left + right)
            if id is not None and types[id] == NORMAL and left in known and right in known:
                pairs.append((-scores[id], id, known[left], known[right], i))
        if not pairs:
            break
        *_, i = min(pairs)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
    return [x for s in symbols for x in ([known[s]] if s in known else [3 + byte for byte in s.encode()])]


TEXTS = st.text(st.sampled_from("abcdehlot é中\n"), max_size=25).filter(lambda text: "\n\n" not in text)
SPM = sentencepiece()
LOADED_SPM = Tokenizer(SPM)


@given(TEXTS)
@settings(max_examples=300)
def test_the_best_score_is_joined_first(text: str) -> None:
    assert LOADED_SPM.encode(text, add_special=False) == definition(text, SPM)
    if text:
        assert LOADED_SPM.decode(LOADED_SPM.encode(text, add_special=False)) == " " + text


def random_vocabulary(seed: int) -> dict[str, Any]:
    """Scores that no training gives: parts worse than their unions, many equal ones, unions of unknown parts."""
    rng = random.Random(seed)
    words = {"".join(rng.choices("ab▁é", k=rng.choice((1, 2, 2, 3, 3, 4, 6)))) for _ in range(40)}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *sorted(words)]
    rare = [rng.choice((NORMAL, NORMAL, NORMAL, CONTROL)) for _ in words]
    return SPM | {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [float(rng.randrange(-6, 1)) for _ in words],
        "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + rare,
    }


@pytest.mark.parametrize("seed", range(25))
def test_any_vocabulary_is_joined_by_the_definition(seed: int) -> None:
    metadata = random_vocabulary(seed)
    tokenizer, rng = Tokenizer(metadata), random.Random(seed)
    for length in (0, 1, 2, 3, 5, 8, 13, 40, 200):
        text = "".join(rng.choices("ab é中", k=length))
        assert tokenizer.encode(text, add_special=False) == definition(text, metadata)


def test_without_space_prefix() -> None:
    tokenizer = Tokenizer(sentencepiece(ggml__add_space_prefix=False))
    assert tokenizer.decode(tokenizer.encode("hello  the\x07", add_special=False)) == "hello  the\x07"
    assert tokenizer.encode("", add_special=True) == [1]


def test_control_tokens_in_text_stay_text(spm: Tokenizer) -> None:
    ids = spm.encode("<s></s><unk> x", add_special=False)
    assert not any(spm.is_control(id) for id in ids)
    assert spm.decode(ids).strip() == "<s></s><unk> x"


def test_user_defined_tokens_are_found_in_text() -> None:
    metadata = sentencepiece()
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "\n\n\n", "a|b"]
    metadata["tokenizer.ggml.scores"] = [*metadata["tokenizer.ggml.scores"], 0.0, 0.0]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], USER_DEFINED, USER_DEFINED]
    tokenizer = Tokenizer(metadata)
    twice, thrice, bar = range(tokenizer.vocab_size - 3, tokenizer.vocab_size)
    ids = tokenizer.encode("a\n\n\n\n\nba|b", add_special=False)
    space_a, space_b = (tokenizer.encode(text, add_special=False) for text in "ab")
    assert ids == [*space_a, thrice, twice, *space_b, bar]  # the longest first, each part a text of its own


def test_token_bytes(spm: Tokenizer) -> None:
    assert spm.token_bytes(3 + 0xC3) == b"\xc3"
    assert spm.token_text(3 + 0xC3) == "\ufffd"
    assert spm.token_text(259 + SPM_WORDS.index("▁hello")) == " hello"


@pytest.mark.parametrize(("change", "expected"), [({}, True), ({"ggml__add_bos_token": False}, False)])
def test_begin_token_defaults(change: dict[str, bool], expected: bool) -> None:
    assert Tokenizer(sentencepiece(**change)).add_bos is expected


def test_broken_metadata() -> None:
    metadata = sentencepiece()
    metadata["tokenizer.ggml.tokens"] = [t if t != "<0x0A>" else "x" for t in metadata["tokenizer.ggml.tokens"]]
    with pytest.raises(FormatError, match="0x0A"):
        Tokenizer(metadata)
    with pytest.raises(UnsupportedModel, match="charsmap"):
        Tokenizer(sentencepiece(ggml__precompiled_charsmap=[1, 2]))


def test_lone_surrogates_are_refused(spm: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="U\\+D800"):
        spm.encode("a\ud800b", add_special=False)


def test_long_texts_leave_the_interpreter_free(spm: Tokenizer) -> None:
    thread = threading.Thread(target=spm.encode, args=("hello the lab " * 100_000,), kwargs={"add_special": False})
    thread.start()
    wakes = 0
    while thread.is_alive():
        time.sleep(0.001)
        wakes += 1
    assert wakes > 20
