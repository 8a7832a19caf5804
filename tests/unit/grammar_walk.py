"""Texts under a grammar, byte by byte, over a vocabulary of all bytes and some tags."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from pelton.engine.constraints import _Bytes
from pelton.engine.grammar_forms import definition_of
from pelton.engine.protocol import Vocabulary
from pelton.request import Grammar

END = 256


class Walk:
    """A grammar over the bytes, the end of a turn and some control tokens."""

    def __init__(self, grammar: Grammar, control: Sequence[str] = ()) -> None:
        self.tokens = [*(bytes([byte]) for byte in range(256)), b"<end>", *(text.encode() for text in control)]
        self.control = {text: END + 1 + at for at, text in enumerate(control)}
        control_ids = [END, *self.control.values()]
        wrapper = _Bytes(Vocabulary(self.tokens, control_ids=control_ids, end_ids=[END]), len(self.tokens))
        wrapper.tokenizer = LLTokenizer(wrapper, eos_token=[END])
        self._matcher = LLMatcher(wrapper.tokenizer, definition_of(grammar), log_level=0)
        assert not self._matcher.is_error(), self._matcher.get_error()

    def ids(self, text: str) -> list[int]:
        """Control tokens where they are named, bytes elsewhere."""
        ids: list[int] = []
        while text:
            name = next((each for each in self.control if text.startswith(each)), None)
            ids += [self.control[name]] if name else list(text[0].encode())
            text = text[len(name) if name else 1 :]
        return ids

    def accepts(self, text: str) -> bool:
        """May this be all of an answer?"""
        matcher = self._matcher.deep_copy()
        ids = self.ids(text)
        return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()

    def random(self, seed: int, limit: int = 600) -> str | None:
        """An answer drawn at random, with a liking for what ends things; None: it has become too long."""
        draw, matcher = random.Random(seed), self._matcher.deep_copy()
        said = b""
        mask = np.zeros(-(-len(self.tokens) // 32), np.uint32)
        while len(said) < limit:
            if matcher.is_stopped():
                return said.decode("utf-8", "replace")
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits).tolist()
            if END in allowed and draw.random() < 0.5:
                return said.decode("utf-8", "replace")
            texts = [id for id in allowed if id < END and (32 <= id < 127 or id == 10)]
            plain = texts or [id for id in allowed if id != END]
            closing = [id for id in plain if chr(id) in '"}])'] if plain and plain[0] < END else []
            id = draw.choice(closing if closing and draw.random() < 0.5 else plain)
            assert matcher.consume_token(id)
            said += self.tokens[id]
        return None
