"""SentencePiece vocabularies (GGUF's `llama`), run as BPE with byte fallback by the compiled core.

The neighbours are joined whose union is the token of the best score, so that nothing has to be made of a vocabulary
but a table of its tokens: with a library for BPE, every split of every token would have to be a merge of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from pelton import _core
from pelton.errors import FormatError
from pelton.text.cutter import Cutter
from pelton.text.tokenizer import SPACE

_NEVER_JOINED = -1


class SentencePiece:
    """Encodes plain text. Thread-safe; texts are encoded with the GIL released."""

    def __init__(
        self,
        vocabulary: _core.Vocabulary,
        is_normal: npt.NDArray[np.bool_],
        is_byte: npt.NDArray[np.bool_],
        scores: npt.NDArray[np.floating],
        user_defined: Mapping[str, int],
        *,
        add_space_prefix: bool,
    ) -> None:
        """`vocabulary`: its tokens, those hidden that text cannot become; those of bytes are hidden here. `scores`: of
        all tokens, the best is joined first. `user_defined`: tokens that are found in text before anything else. Raises
        `FormatError` where a byte has no token."""
        byte_ids = np.array([vocabulary.id_of(f"<0x{byte:02X}>") for byte in range(256)], np.int32)
        missing = np.flatnonzero(byte_ids < 0)
        if missing.size:
            raise FormatError(f"tokenizer.ggml.tokens has no token for byte 0x{missing[0]:02X}")
        vocabulary.hide(np.flatnonzero(is_byte).astype(np.int32))
        ranks = np.full(len(vocabulary), _NEVER_JOINED, np.int32)
        normal = np.flatnonzero(is_normal)
        ranks[normal[np.argsort(-scores[normal], kind="stable")]] = np.arange(normal.size, dtype=np.int32)
        self._core = _core.SentencePiece(vocabulary, ranks, byte_ids)
        self._cut = Cutter(user_defined)
        self._prefix = SPACE if add_space_prefix else ""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Raises TypeError for a lone surrogate."""
        return self._cut.encode(texts, self._encode_all)

    def _encode_all(self, parts: Sequence[str]) -> list[list[int]]:
        return [self._core.encode(self._prefix + part.replace(" ", SPACE)) for part in parts]
