"""Words as tokens."""

from __future__ import annotations

import pytest

from pelton.errors import InvalidRequest
from pelton.text.tokenizer import Tokenizer
from pelton.text.words import TokenSearch, spellings
from tests.unit.vocabularies import byte_level

TOKENIZER = Tokenizer(byte_level())


def test_a_word_is_spelt_at_the_beginning_and_after_a_space() -> None:
    found = spellings(TOKENIZER, ["over", " over", "the"])
    assert [TOKENIZER.decode(ids) for ids in found] == ["over", " over", "the", " the"]
    assert len(set(found)) == 4


@pytest.mark.parametrize("word", ["", " "])
def test_a_word_without_tokens_is_refused(word: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        spellings(TOKENIZER, ["fine", word])
    assert caught.value.param == "bad_words"


def test_tokens_are_found_by_what_they_hold() -> None:
    search = TokenSearch(TOKENIZER)
    found = search.ids_with(["th", "!"])
    texts = [TOKENIZER.token_text(id) for id in range(TOKENIZER.vocab_size)]
    assert list(found) == [id for id, text in enumerate(texts) if "th" in text or "!" in text]
    assert len(found) > 2
    nowhere = "zqzq"
    assert search.ids_with([nowhere]) == tuple(TOKENIZER.encode(nowhere, add_special=False)[-1:])
