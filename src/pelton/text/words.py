"""Words as tokens: how a vocabulary spells them, and where in it they stand."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from pelton.errors import InvalidRequest

if TYPE_CHECKING:
    from pelton.text.tokenizer import Tokenizer


def spellings(tokenizer: Tokenizer, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """The token sequences of words, each as it is spelt at the beginning of a text and after a space.

    Raises `InvalidRequest` for a word that the vocabulary has no tokens for.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        stem = word.lstrip(" ")
        ids = [tuple(tokenizer.encode(text, add_special=False)) for text in (stem, f" {stem}")]
        if not stem or not all(ids):
            raise InvalidRequest(f"bad_words: {word!r} has no tokens in this vocabulary", param="bad_words")
        found |= dict.fromkeys(ids)
    return tuple(found)


class TokenSearch:
    """Finds tokens by the text that they hold. The first search reads the whole vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids_with_one = lru_cache(1024)(self._find)

    def ids_with(self, texts: Iterable[str]) -> tuple[int, ...]:
        """Tokens that hold one of these texts, ascending; of a text that no token holds, the last of its own."""
        return tuple(sorted({id for text in texts for id in self._ids_with_one(text)}))

    @cached_property
    def _tokens(self) -> list[bytes]:
        return [self._tokenizer.token_bytes(id) for id in range(self._tokenizer.vocab_size)]

    def _find(self, text: str) -> tuple[int, ...]:
        data = text.encode()
        ids = tuple(id for id, token in enumerate(self._tokens) if data in token)
        return ids or tuple(self._tokenizer.encode(text, add_special=False)[-1:])
