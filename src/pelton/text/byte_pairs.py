"""Byte-level BPE vocabularies (GGUF's `gpt2`): a library cuts text into words, the compiled core joins their bytes.

The library could do both, but takes half a second for a vocabulary of 152k tokens, before which as many strings and
pairs of strings have to be made; the core reads them as the file has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from pelton import _core
from pelton.errors import FormatError
from pelton.formats.strings import Strings
from pelton.text.cutter import Cutter
from pelton.text.pretokenizers import PreTokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class BytePairs:
    """Encodes plain text. Thread-safe; texts are encoded with the GIL released."""

    def __init__(
        self,
        vocabulary: _core.Vocabulary,
        merges: Strings,
        row: PreTokenizer,
        characters: Mapping[str, int],
        user_defined: Mapping[str, int],
    ) -> None:
        """`vocabulary`: its tokens, those hidden that text cannot become. `characters`: what stands for each byte.
        `user_defined`: tokens that are found in text before anything else. Raises `FormatError` for merges of what is
        no token."""
        by_byte = sorted(characters, key=characters.__getitem__)
        try:
            self._core = _core.BytePairs(vocabulary, merges.data, merges.count, by_byte, row.ignores_merges)
        except ValueError as error:
            raise FormatError(f"{merges.where}{error}") from None
        self._row = row
        self._cut = Cutter(user_defined)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Raises TypeError for a lone surrogate."""
        return self._cut.encode(texts, self._encode_all)

    def _encode_all(self, parts: Sequence[str]) -> list[list[int]]:
        found = self._words.encode_batch(parts, add_special_tokens=False)
        return [self._core.encode(part, words.offsets) for part, words in zip(parts, found, strict=True)]

    @cached_property
    def _words(self) -> Tokenizer:
        """Its tokens are words, all of them unknown: only where they stand is of use."""
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers

        words = Tokenizer(models.WordLevel({"": 0}, unk_token=""))
        words.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(expression), "isolated") for expression in self._row.expressions]
        )
        return words
