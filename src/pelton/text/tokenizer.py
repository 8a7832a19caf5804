"""Text <-> token ids, built from a model file's own metadata.

Two kinds of vocabulary: `gpt2` (byte-level BPE) and `llama` (SentencePiece, run as BPE with byte fallback). Control
tokens (`<|im_start|>`, `<eos>`, ...) are not part of the vocabulary that text is encoded with: no text can ever become
one. Only `encode_segments` makes them, and only from text that a template wrote.

Characters that a vocabulary has no bytes for (SmolLM2 lacks U+0004, for example) are dropped, as its reference does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pelton.errors import FormatError, InvalidRequest, UnsupportedModel
from pelton.text.pretokenizers import pre_tokenizer

if TYPE_CHECKING:
    import tokenizers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Values of `tokenizer.ggml.token_type`."""

_SPACE = "▁"

_TURN_ENDS = frozenset(
    [
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<turn|>",
        "<|tool_response>",
        "<｜end▁of▁sentence｜>",
        "[e~[",
    ]
)
"""Tokens that end a turn wherever they exist, also where the file forgot to call them control tokens."""
_CONTROL_TURN_ENDS = frozenset(["</s>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"])
"""Tokens that end a turn if the file calls them control tokens: in other vocabularies they are plain text."""
_FILE_ENDS = frozenset(
    [
        "<|fim_pad|>",
        "<fim-pad>",
        "<fim_pad>",
        "<PAD>",
        "<|fim_repo|>",
        "<|repo_name|>",
        "<fim-repo>",
        "<REPO>",
        "<reponame>",
        "<|file_sep|>",
    ]
)
"""Control tokens with which code models leave the file that they were completing."""
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id", "fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id")


def _byte_characters() -> dict[str, int]:
    """Character -> byte of byte-level BPE: printable Latin-1 stands for itself, the rest is moved to U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(moved)}


_BYTES = _byte_characters()


class Tokenizer:
    """One model's vocabulary. Thread-safe; long texts are encoded with the GIL released."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        """Build from GGUF metadata. Raises `FormatError` for a broken vocabulary, `UnsupportedModel` for an
        unknown kind."""
        self._kind = str(metadata.get("tokenizer.ggml.model", ""))
        if self._kind not in ("gpt2", "llama"):
            raise UnsupportedModel(f"tokenizer.ggml.model is {self._kind!r}; Pelton reads gpt2 and llama")
        self._texts: Sequence[str] = _array(metadata, "tokens")
        self._types: list[int] = np.asarray(_array(metadata, "token_type", len(self._texts), NORMAL)).tolist()
        self.vocab_size = len(self._texts)
        """Number of token ids: those of [0, vocab_size) exist."""
        self._mark_turn_ends()
        self._control = {
            text: id
            for id, (text, kind) in enumerate(zip(self._texts, self._types, strict=True))
            if kind in (CONTROL, UNKNOWN) and text
        }
        self.control_texts: tuple[str, ...] = tuple(sorted(self._control, key=len, reverse=True))
        """The names of all control tokens, the longest first."""
        self.control_pattern = re.compile("|".join(map(re.escape, self.control_texts)) or "(?!)")
        """Matches the text of any control token, the longest first."""
        # The types' defaults are those that llama.cpp takes where a file does not say.
        is_spm = self._kind == "llama"
        self.bos_id = self._special(metadata, "bos_token_id", 1 if is_spm else None)
        self.eos_id = self._special(metadata, "eos_token_id", 2 if is_spm else None)
        self.end_ids = self._find_end_ids(metadata)
        """Every token that ends a turn, ascending."""
        adds_bos = is_spm
        if is_spm:
            self._encoder = _build_spm(metadata, self._texts, self._types)
        else:
            row = pre_tokenizer(str(metadata.get("tokenizer.ggml.pre", "")))
            adds_bos = row.adds_bos
            self._encoder = _build_bpe(metadata, self._texts, self._types, row.expressions, row.ignores_merges)
        self.add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos)) and self.bos_id is not None
        """Whether the model wants its begin token before every text."""
        self.add_eos = bool(metadata.get("tokenizer.ggml.add_eos_token", False)) and self.eos_id is not None
        """Whether the model wants its end token after every text."""
        self._pieces: dict[int, bytes] = {}

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Ids of plain text: text that looks like a control token stays text. With `add_special`, the begin and
        end tokens that the metadata asks for stand around it."""
        ids = self._encode_pieces([text])[0]
        if not add_special:
            return ids
        return (
            ([self.bos_id] if self.add_bos and self.bos_id is not None else [])
            + ids
            + ([self.eos_id] if self.add_eos and self.eos_id is not None else [])
        )

    def encode_segments(self, segments: Iterable[str | int]) -> list[int]:
        """Ids of a rendered template: strings are plain text, numbers are control tokens. The begin token comes
        first if the metadata asks for it and the template has not written it."""
        parts = [segment for segment in segments if segment != ""]
        texts = [part for part in parts if isinstance(part, str)]
        encoded = iter(self._encode_pieces(texts))
        ids: list[int] = []
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += next(encoded)
        if self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of `ids` as they continue a text (no leading space is taken off). Bytes that are not UTF-8
        become U+FFFD."""
        return b"".join(self.token_bytes(id) for id in ids if not (skip_special and self.is_control(id))).decode(
            "utf-8", "replace"
        )

    def token_bytes(self, id: int) -> bytes:
        """The bytes that token `id` adds to a text; a control token's are its name. Unused ids have none."""
        piece = self._pieces.get(id)
        if piece is None:
            piece = self._pieces[id] = self._make_bytes(id)
        return piece

    def token_text(self, id: int) -> str:
        """`token_bytes` as text; U+FFFD where the token holds part of a character."""
        return self.token_bytes(id).decode("utf-8", "replace")

    def is_control(self, id: int) -> bool:
        """Whether `id` is a control token (or the unknown token): never part of a text."""
        return self._types[id] in (CONTROL, UNKNOWN)

    def control_id(self, text: str) -> int | None:
        """The control token whose name is `text`."""
        return self._control.get(text)

    def _encode_pieces(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        try:
            batch = self._encoder.encode_batch_fast(texts, add_special_tokens=False)
        except TypeError:  # All that the library says of a string that UTF-8 cannot carry.
            raise _lone_surrogate(texts) from None
        return [encoding.ids for encoding in batch]

    def _make_bytes(self, id: int) -> bytes:
        text, kind = self._texts[id], self._types[id]
        if kind == UNUSED:
            return b""
        if kind == BYTE:
            return bytes([int(text[3:5], 16)])
        if kind == NORMAL and self._kind == "llama":
            return text.replace(_SPACE, " ").encode()
        if kind == NORMAL and all(character in _BYTES for character in text):
            return bytes(_BYTES[character] for character in text)
        return text.encode()

    def _special(self, metadata: Mapping[str, Any], key: str, default: int | None) -> int | None:
        id = metadata.get(f"tokenizer.ggml.{key}", default)
        if id is None:
            return None
        if not 0 <= int(id) < self.vocab_size:
            raise FormatError(f"tokenizer.ggml.{key} is {id}, but the vocabulary has {self.vocab_size} tokens")
        return int(id)

    def _mark_turn_ends(self) -> None:
        for id, text in enumerate(self._texts):
            if text in _TURN_ENDS:
                self._types[id] = CONTROL

    def _find_end_ids(self, metadata: Mapping[str, Any]) -> tuple[int, ...]:
        names = _TURN_ENDS | _CONTROL_TURN_ENDS | _FILE_ENDS
        found = {text: id for text, id in self._control.items() if text in names}
        if {"<|return|>", "<|call|>"} <= found.keys() or {"<|calls|>", "<|flush|>"} <= found.keys():
            found.pop("<|end|>", None)  # In these vocabularies it ends a message inside a turn.
        if "<|tool_response>" in found:
            found.pop("</s>", None)
        ids = set(found.values())
        ids |= {id for key in _END_KEYS if (id := self._special(metadata, key, None)) is not None}
        return tuple(sorted(ids | ({self.eos_id} if self.eos_id is not None else set())))


def _array(metadata: Mapping[str, Any], name: str, length: int | None = None, default: int | None = None) -> Any:
    """The list `tokenizer.ggml.<name>`, of `length` entries; filled with `default` where the file has none."""
    values = metadata.get(f"tokenizer.ggml.{name}")
    if values is None and length is not None and default is not None:
        return [default] * length
    if values is None:
        raise FormatError(f"tokenizer.ggml.{name} is missing")
    if isinstance(values, str | bytes) or not hasattr(values, "__len__"):
        raise FormatError(f"tokenizer.ggml.{name} is not an array")
    if length is not None and len(values) != length:
        raise FormatError(f"tokenizer.ggml.{name} has {len(values)} entries, the vocabulary {length}")
    return values


def _lone_surrogate(texts: Sequence[str]) -> InvalidRequest:
    found = re.search("[\ud800-\udfff]", "".join(texts))
    return InvalidRequest(f"the text is not Unicode: U+{ord(found[0]) if found else 0xD800:04X} stands alone in it")


def _vocabulary(texts: Sequence[str], types: Sequence[int]) -> dict[str, int]:
    """Text -> id of all tokens that text can become: no control token is among them."""
    return {
        text: id
        for id, (text, kind) in enumerate(zip(texts, types, strict=True))
        if kind in (NORMAL, USER_DEFINED, BYTE)
    }


def _add_user_defined(encoder: tokenizers.Tokenizer, texts: Sequence[str], types: Sequence[int]) -> None:
    from tokenizers import AddedToken

    encoder.add_tokens(
        [
            AddedToken(text, normalized=False, special=False)
            for text, kind in zip(texts, types, strict=True)
            if kind == USER_DEFINED and text
        ]
    )


def _build_bpe(
    metadata: Mapping[str, Any],
    texts: Sequence[str],
    types: Sequence[int],
    expressions: Sequence[str],
    ignores_merges: bool,
) -> tokenizers.Tokenizer:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    merges = [(merge[: (cut := merge.find(" ", 1))], merge[cut + 1 :]) for merge in _array(metadata, "merges")]
    try:
        model = models.BPE(vocab=_vocabulary(texts, types), merges=merges, ignore_merges=ignores_merges)
    except Exception as error:  # The library raises no type of its own.
        raise FormatError(f"tokenizer.ggml.merges: {error}") from None
    encoder = Tokenizer(model)
    encoder.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(expression), "isolated") for expression in expressions),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    _add_user_defined(encoder, texts, types)
    return encoder


def _spm_merges(
    vocabulary: Mapping[str, int], texts: Sequence[str], types: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Every split of a normal token into two tokens, those of the best score first.

    SentencePiece joins the two neighbours whose union has the best score; BPE joins those of the lowest rank. Ranking
    all splits by the score of their union makes the second do what the first does.
    """
    normal = [id for id, kind in enumerate(types) if kind == NORMAL and len(texts[id]) > 1]
    normal.sort(key=lambda id: -scores[id])
    merges: list[tuple[str, str]] = []
    for id in normal:
        text = texts[id]
        found = [
            (left, right)
            for cut in range(1, len(text))
            if (right := text[cut:]) in vocabulary and (left := text[:cut]) in vocabulary
        ]
        if len(found) > 1:
            found.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        merges += found
    return merges


def _build_spm(metadata: Mapping[str, Any], texts: Sequence[str], types: Sequence[int]) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer, models, normalizers

    if metadata.get("tokenizer.ggml.precompiled_charsmap") is not None:
        raise UnsupportedModel("tokenizer.ggml.precompiled_charsmap: this vocabulary normalises text; Pelton cannot")
    scores: list[float] = np.asarray(_array(metadata, "scores", len(texts))).tolist()
    vocabulary = _vocabulary(texts, types)
    missing = [byte for byte in range(256) if f"<0x{byte:02X}>" not in vocabulary]
    if missing:
        raise FormatError(f"tokenizer.ggml.tokens has no token for byte 0x{missing[0]:02X}")
    merges = _spm_merges(vocabulary, texts, types, scores)
    encoder = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True))
    steps: list[Any] = [normalizers.Replace(" ", _SPACE)]
    if bool(metadata.get("tokenizer.ggml.add_space_prefix", True)):
        steps.insert(0, normalizers.Prepend(_SPACE))
    encoder.normalizer = normalizers.Sequence(steps)
    _add_user_defined(encoder, texts, types)
    return encoder
