"""SentencePiece vocabularies (GGUF's `llama`), run as BPE with byte fallback by the compiled core.

The neighbours are joined whose union is the token of the best score, so that nothing has to be made of a vocabulary
but a table of its tokens: with a library for BPE, every split of every token would have to be a merge of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from pelton import _core
from pelton.errors import FormatError
from pelton.text.tokenizer import SPACE

_NEVER_JOINED, _NO_TEXT = -1, -2


class SentencePiece:
    """Encodes plain text. Thread-safe; texts are encoded with the GIL released."""

    def __init__(
        self,
        texts: Sequence[str],
        by_text: Mapping[str, int],
        is_normal: npt.NDArray[np.bool_],
        is_byte: npt.NDArray[np.bool_],
        scores: npt.NDArray[np.floating],
        user_defined: Sequence[str],
        *,
        add_space_prefix: bool,
    ) -> None:
        """`texts`: of all tokens; `by_text`: those that text can become. `scores`: of all tokens, the best is joined
        first. `user_defined`: tokens that are found in text before anything else. Raises `FormatError` where a byte has
        no token."""
        missing = [byte for byte in range(256) if _byte_name(byte) not in by_text]
        if missing:
            raise FormatError(f"tokenizer.ggml.tokens has no token for byte 0x{missing[0]:02X}")
        ranks = np.full(len(texts), _NO_TEXT, np.int32)
        ranks[np.fromiter(by_text.values(), np.int64, len(by_text))] = _NEVER_JOINED
        normal = np.flatnonzero(is_normal & (ranks != _NO_TEXT))
        ranks[normal[np.argsort(-scores[normal], kind="stable")]] = np.arange(normal.size, dtype=np.int32)
        ranks[is_byte] = _NO_TEXT
        byte_ids = np.array([by_text[_byte_name(byte)] for byte in range(256)], np.int32)
        self._core = _core.SentencePiece(texts, ranks, byte_ids)
        self._user_defined = {text: by_text[text] for text in user_defined}
        longest_first = "|".join(map(re.escape, sorted(user_defined, key=len, reverse=True)))
        self._cut = re.compile(f"({longest_first or '(?!)'})").split
        self._prefix = SPACE if add_space_prefix else ""

    def encode(self, text: str) -> list[int]:
        """Raises TypeError for a lone surrogate."""
        ids: list[int] = []
        for i, part in enumerate(self._cut(text)):
            if i % 2:
                ids.append(self._user_defined[part])
            elif part:
                ids += self._core.encode(self._prefix + part.replace(" ", SPACE))
        return ids


def _byte_name(byte: int) -> str:
    return f"<0x{byte:02X}>"
