"""Text <-> token ids, built from a model file's own metadata.

Two kinds of vocabulary: `gpt2` (byte-level BPE) and `llama` (SentencePiece, run as BPE with byte fallback). Control
tokens (`<|im_start|>`, `<eos>`, ...) are not part of the vocabulary that text is encoded with: no text can ever become
one. Only `encode_segments` makes them, and only from text that a template wrote.

Characters that a vocabulary has no bytes for (SmolLM2 lacks U+0004, for example) are dropped, as its reference does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from pelton import _core
from pelton.errors import FormatError, InvalidRequest, UnsupportedModel
from pelton.formats.gguf import Metadata
from pelton.formats.strings import Strings
from pelton.text import end_tokens
from pelton.text.finder import Finder
from pelton.text.pretokenizers import PreTokenizer, pre_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Values of `tokenizer.ggml.token_type`."""

SPACE = "▁"
"""What stands for a space in a token of SentencePiece."""
_Encode = Callable[[list[str]], list[list[int]]]
"""Texts to ids, none of them a control token's. Raises TypeError for a lone surrogate."""


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
        words = _Words(metadata)
        self._vocabulary = words.vocabulary
        self.vocab_size = len(words.vocabulary)
        """Number of token ids: those of [0, vocab_size) exist."""
        self._types: list[int] = words.types.tolist()
        self._control = words.control
        self.control_texts: tuple[str, ...] = tuple(sorted(self._control, key=len, reverse=True))
        """The names of all control tokens, the longest first."""
        self._controls = Finder(self._control)
        # The types' defaults are those that llama.cpp takes where a file does not say.
        is_spm = self._kind == "llama"
        self.bos_id = self.special_id(metadata, "bos_token_id", 1 if is_spm else None)
        self.eos_id = self.special_id(metadata, "eos_token_id", 2 if is_spm else None)
        named = (self.special_id(metadata, key, None) for key in end_tokens.KEYS)
        ids = {self.eos_id, *named, *end_tokens.among(self._control)}
        self.end_ids = tuple(sorted(id for id in ids if id is not None))
        """Every token that ends a turn, ascending."""
        adds_bos = is_spm
        if is_spm:
            self._encode_plain = _build_spm(metadata, words)
        else:
            row = pre_tokenizer(str(metadata.get("tokenizer.ggml.pre", "")))
            adds_bos = row.adds_bos
            self._encode_plain = _build_bpe(metadata, words, row)
        self.add_bos = _flag(metadata, "add_bos_token", adds_bos) and self.bos_id is not None
        """Whether the model wants its begin token before every text."""
        self.add_eos = _flag(metadata, "add_eos_token", False) and self.eos_id is not None
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

    @cached_property
    def max_token_length(self) -> int:
        """Characters of the longest token. A text of n characters has at least n / `max_token_length` tokens."""
        return self._vocabulary.longest() or 1

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

    def find_controls(self, text: str) -> Iterator[tuple[int, str]]:
        """Where a text has the names of control tokens, in order: the longest at each place, none within another."""
        return self._controls.find(text)

    def _encode_pieces(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        try:
            return self._encode_plain(texts)
        except TypeError:  # All that the libraries say of a string that UTF-8 cannot carry.
            raise _lone_surrogate(texts) from None

    def _make_bytes(self, id: int) -> bytes:
        text, kind = self._vocabulary.text(id), self._types[id]
        if kind == UNUSED:
            return b""
        if kind == BYTE:
            return bytes([int(text[3:5], 16)])
        if kind == NORMAL and self._kind == "llama":
            return text.replace(SPACE, " ").encode()
        if kind == NORMAL and all(character in _BYTES for character in text):
            return bytes(_BYTES[character] for character in text)
        return text.encode()

    def special_id(self, metadata: Mapping[str, Any], key: str, default: int | None = None) -> int | None:
        """The id `tokenizer.ggml.<key>`, if the file has it. Raises `FormatError` where it is no token's."""
        id = metadata.get(f"tokenizer.ggml.{key}", default)
        if id is None:
            return None
        if not isinstance(id, int):
            raise FormatError(f"tokenizer.ggml.{key} is no token's id")
        if not 0 <= id < self.vocab_size:
            raise FormatError(f"tokenizer.ggml.{key} is {id}, but the vocabulary has {self.vocab_size} tokens")
        return id


def _flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    """Is `tokenizer.ggml.<name>` set?"""
    value = metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, int):  # a bool is one
        raise FormatError(f"tokenizer.ggml.{name} is neither true nor false")
    return bool(value)


def _array(metadata: Mapping[str, Any], name: str) -> Sequence[Any]:
    """The list `tokenizer.ggml.<name>`."""
    values: Any = metadata.get(f"tokenizer.ggml.{name}")
    if values is None:
        raise FormatError(f"tokenizer.ggml.{name} is missing")
    if isinstance(values, str | bytes) or not hasattr(values, "__len__"):
        raise FormatError(f"tokenizer.ggml.{name} is not an array")
    found: Sequence[Any] = values
    return found


def _numbers(metadata: Mapping[str, Any], name: str, length: int) -> npt.NDArray[Any]:
    """The numbers `tokenizer.ggml.<name>`, one for each of `length` tokens."""
    values = _array(metadata, name)
    if len(values) != length:
        raise FormatError(f"tokenizer.ggml.{name} has {len(values)} entries, the vocabulary {length}")
    numbers = np.array(values)
    if length and numbers.dtype.kind not in "iuf":
        raise FormatError(f"tokenizer.ggml.{name} is not an array of numbers")
    return numbers


def _lone_surrogate(texts: Sequence[str]) -> InvalidRequest:
    found = re.search("[\ud800-\udfff]", "".join(texts))
    return InvalidRequest(f"the text is not Unicode: U+{ord(found[0]) if found else 0xD800:04X} stands alone in it")


def _strings(metadata: Mapping[str, Any], name: str) -> Strings:
    """The strings `tokenizer.ggml.<name>`, as they lie in a file."""
    key = f"tokenizer.ggml.{name}"
    if isinstance(metadata, Metadata) and (encoded := metadata.encoded(key)) is not None:
        return encoded
    texts = _array(metadata, name)
    if not all(isinstance(text, str) for text in texts):
        raise FormatError(f"{key} is not an array of strings")
    return Strings.of(key, texts)


class _Words:
    """The tokens by kind."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        tokens = _strings(metadata, "tokens")
        try:
            self.vocabulary = _core.Vocabulary(tokens.data, tokens.count)
        except ValueError as error:
            raise FormatError(f"{tokens.where}{error}") from None
        find, text = self.vocabulary.id_of, self.vocabulary.text
        self.types = np.full(tokens.count, NORMAL)
        """Of each token."""
        if metadata.get("tokenizer.ggml.token_type") is not None:
            self.types = _numbers(metadata, "token_type", tokens.count)
        self.types[[id for name in end_tokens.ALWAYS if (id := find(name)) >= 0]] = CONTROL
        self.control: dict[str, int] = {}
        """Name -> id of the control tokens and of the unknown token."""
        never = np.flatnonzero(np.isin(self.types, (CONTROL, UNKNOWN, UNUSED))).astype(np.int32)
        for id in never[self.types[never] != UNUSED].tolist():
            if name := text(id):
                self.control[name] = id
        self.vocabulary.hide(never)
        self.user_defined = {
            name: id for id in np.flatnonzero(self.types == USER_DEFINED).tolist() if (name := text(id))
        }
        """Text -> id of the tokens that are found in text before anything else."""
        for id in np.flatnonzero(self.types == BYTE).tolist():
            if not re.fullmatch("<0x[0-9A-F]{2}>", text(id)):
                raise FormatError(f"tokenizer.ggml.tokens[{id}] is a byte, but not of the form <0x0A>")


def _build_bpe(metadata: Mapping[str, Any], words: _Words, row: PreTokenizer) -> _Encode:
    from pelton.text.byte_pairs import BytePairs

    return BytePairs(words.vocabulary, _strings(metadata, "merges"), row, _BYTES, words.user_defined).encode


def _build_spm(metadata: Mapping[str, Any], words: _Words) -> _Encode:
    from pelton.text.sentencepiece import SentencePiece

    if metadata.get("tokenizer.ggml.precompiled_charsmap") is not None:
        raise UnsupportedModel("tokenizer.ggml.precompiled_charsmap: this vocabulary normalises text; Pelton cannot")
    return SentencePiece(
        words.vocabulary,
        is_normal=words.types == NORMAL,
        is_byte=words.types == BYTE,
        scores=_numbers(metadata, "scores", len(words.vocabulary)).astype(np.float64),
        user_defined=words.user_defined,
        add_space_prefix=_flag(metadata, "add_space_prefix", True),
    ).encode
