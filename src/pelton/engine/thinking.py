"""Thoughts before the answer: when they end, and that a grammar holds for the answer alone.

A model thinks between two tags. While it does, all tokens are allowed, as many as its budget has; then the closing tag
is forced, token by token. What follows is under the grammar, if there is one.

Where a text stands is a small value that a token leads to the next one from; trying out drafts needs no undoing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from pelton.request import Thinking

if TYPE_CHECKING:
    from pelton.engine.constraints import Constraint, Masks
    from pelton.errors import PeltonError

_WHITE_SPACE = b" \n\t\r"
_MAX_FOR_CHARACTER = 3
"""Tokens over the budget in which a character may still be completed."""
_ALL = np.uint32(0xFFFFFFFF)


class TokenTable:
    """The tokens by their bytes."""

    def __init__(self, tokens: Sequence[bytes], end_ids: Sequence[int]) -> None:
        self.tokens = tokens
        self.end_ids = end_ids
        self.ids = {token: id for id, token in reversed(list(enumerate(tokens))) if token}
        self.line_feeds = [id for id, token in enumerate(tokens) if token in (b"\n", b"\n\n")]
        self._starting_with: dict[bytes, list[int]] = {}
        self._longest = max(map(len, tokens), default=0)

    def forced(self, text: bytes) -> int:
        """The longest token that `text` begins with."""
        if text.startswith(b"\n"):  # not joined with the tag: models are trained on the tag's own token
            return self.ids[b"\n"]
        lengths = range(min(len(text), self._longest), 0, -1)
        return next(self.ids[text[:length]] for length in lengths if text[:length] in self.ids)

    def can_force(self, text: bytes) -> bool:
        """Is there a token to force at each place of `text`, and of a line feed before it?"""
        places = range(len(text))
        return b"\n" in self.ids and all(any(text[at : end + 1] in self.ids for end in places[at:]) for at in places)

    def starting_with(self, text: bytes) -> list[int]:
        """The tokens that begin with `text`."""
        if text not in self._starting_with:
            self._starting_with[text] = [id for id, token in enumerate(self.tokens) if token.startswith(text)]
        return self._starting_with[text]


class State(NamedTuple):
    """Where a text stands. `start`: it may turn out to begin with thoughts. `gap`: line feeds may separate the answer
    from them."""

    phase: Literal["start", "thoughts", "closing", "gap", "answer"]
    num_tokens: int = 0
    """Of the thoughts so far."""
    tail: bytes = b""
    """What the text ends with, as far as it matters; while closing, what is to come."""


class ThinkingConstraint:
    """Where one choice stands; `answer` is the constraint of what follows its thoughts."""

    def __init__(self, thinking: Thinking, table: TokenTable, answer: Constraint | None) -> None:
        self._thinking = thinking
        self._table = table
        self._open, self._close = thinking.open.encode(), thinking.close.encode()
        self._answer = answer
        self._state = self._opened() if thinking.is_open else State("start")
        self._open_id = table.ids.get(self._open)

    def fork(self) -> ThinkingConstraint:
        """A second one that stands where this one does."""
        other = ThinkingConstraint(self._thinking, self._table, None if self._answer is None else self._answer.fork())
        other._state = self._state
        return other

    @property
    def warnings(self) -> tuple[str, ...]:
        """What of the answer's grammar is not enforced."""
        return () if self._answer is None else self._answer.warnings

    @property
    def is_finished(self) -> bool:
        """Is the text complete, with nothing that may follow?"""
        return self._state.phase == "answer" and self._answer is not None and self._answer.is_finished

    @property
    def error(self) -> PeltonError | None:
        """Why it cannot go on, if so."""
        return None if self._answer is None else self._answer.error

    def accept(self, token: int) -> None:
        """Go on by a token that was drawn under the mask."""
        if self._is_answer(self._state, token):
            self._state = State("answer")
            if self._answer is not None:
                self._answer.accept(token)
        else:
            self._state = self._after(self._state, token)

    def check(self, drafts: Sequence[int]) -> int:
        """How many of the drafted tokens, from the first on, are allowed here."""
        state = self._state
        for at, token in enumerate(drafts):
            if self._is_answer(state, token):
                return len(drafts) if self._answer is None else at + self._answer.check(drafts[at:])
            if not self._allows(state, token):
                return at
            state = self._after(state, token)
        return len(drafts)

    def forced(self) -> Sequence[int]:
        """The tokens that must come next, as far as there is no choice."""
        if self._state.phase == "closing":
            return [self._table.forced(self._state.tail)]
        return () if self._state.phase != "answer" or self._answer is None else self._answer.forced()

    def begun(self) -> bytes:
        """What the answer must go on with, whichever tokens spell it."""
        return b"" if self._state.phase != "answer" or self._answer is None else self._answer.begun()

    def fill(self, masks: Masks, drafts: Sequence[int]) -> None:
        """Write `1 + len(drafts)` rows: what may come next, and what after each of the drafts, which are allowed."""
        state = self._state
        for at, token in enumerate([*drafts, -1]):
            if state.phase == "answer" or (token >= 0 and self._is_answer(state, token)):
                self._fill_answer(masks[at:], drafts[at:])
                if state.phase != "answer":
                    self._allow_instead(state, masks[at])
                return
            self._fill_one(state, masks[at])
            if token >= 0:
                state = self._after(state, token)

    def _opened(self) -> State:
        is_over = self._thinking.budget == 0
        return State("closing", tail=self._close) if is_over else State("thoughts")

    def _is_answer(self, state: State, token: int) -> bool:
        """Is this the answer's token (and not one of thoughts, or between them and the answer)?"""
        if state.phase == "answer":
            return True
        if state.phase == "gap":
            return token not in self._table.line_feeds
        if state.phase != "start":
            return False
        if self._answer is not None:  # the answer's grammar takes the text from its beginning
            return token != self._open_id
        text = (state.tail + self._table.tokens[token]).lstrip(_WHITE_SPACE)
        return not self._open.startswith(text) and not text.startswith(self._open)

    def _allows(self, state: State, token: int) -> bool:
        """Of a token that is not the answer's: may it come?"""
        if state.phase == "closing":
            return token == self._table.forced(state.tail)
        return state.phase != "thoughts" or self._answer is None or not self._breaks(state, token)

    def _breaks(self, state: State, token: int) -> bool:
        """Would this token end the turn without an answer, or begin the answer in the middle of itself?"""
        if token in self._table.end_ids:
            return True
        _, close, rest = (state.tail + self._table.tokens[token]).partition(self._close)
        return bool(close and rest.strip(_WHITE_SPACE))

    def _after(self, state: State, token: int) -> State:
        """Where the text stands after one more token, which is not the answer's."""
        text = self._table.tokens[token]
        match state.phase:
            case "start":
                text = (state.tail + text).lstrip(_WHITE_SPACE)
                return self._opened() if text.startswith(self._open) else State("start", tail=text)
            case "closing":
                rest = state.tail[len(text) :]
                return State("closing", tail=rest) if rest else State("gap")
            case "thoughts":
                return self._after_thought(state, state.tail + text)
        return State("answer")  # line feeds come once

    def _after_thought(self, state: State, text: bytes) -> State:
        if self._close in text:
            return State("gap")
        num_tokens, budget = state.num_tokens + 1, self._thinking.budget
        if budget is not None and num_tokens >= budget:
            is_cut = _is_cut(text) and num_tokens < budget + _MAX_FOR_CHARACTER
            if not is_cut:
                begun = _begun(text, self._close)
                line_feed = b"" if begun or text.endswith(b"\n") else b"\n"
                return State("closing", tail=line_feed + self._close[begun:])
        return State("thoughts", num_tokens, text[-max(len(self._close) - 1, _MAX_FOR_CHARACTER) :])

    def _fill_one(self, state: State, mask: Masks) -> None:
        """What may come in a state before the answer."""
        match state.phase:
            case "closing":
                mask[:] = 0
                _allow(mask, self._table.forced(state.tail))
            case "thoughts":
                mask[:] = _ALL
                if self._answer is not None:
                    self._forbid_breaks(state, mask)
            case _:
                self._fill_answer(mask[None], [])
                self._allow_instead(state, mask)

    def _forbid_breaks(self, state: State, mask: Masks) -> None:
        begun = _begun(state.tail, self._close)
        doubtful = list(self._table.end_ids)
        if begun:
            doubtful += self._table.starting_with(self._close[begun:])
        for id in doubtful:
            if self._breaks(state, id):
                mask[id // 32] &= ~np.uint32(1 << id % 32)

    def _fill_answer(self, masks: Masks, drafts: Sequence[int]) -> None:
        if self._answer is None:
            masks[:] = _ALL
        else:
            self._answer.fill(masks, drafts)

    def _allow_instead(self, state: State, mask: Masks) -> None:
        """What may come in place of the answer's first token."""
        if state.phase == "gap":
            for id in self._table.line_feeds:
                _allow(mask, id)
        elif state.phase == "start" and self._open_id is not None:
            _allow(mask, self._open_id)


def _allow(mask: Masks, id: int) -> None:
    mask[id // 32] |= np.uint32(1 << id % 32)


def _begun(text: bytes, tag: bytes) -> int:
    """How much of `tag` the text ends with, less than all of it."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)


def _is_cut(text: bytes) -> bool:
    """Does it end inside of a character?"""
    for back in range(1, min(len(text), 3) + 1):
        byte = text[-back]
        if byte >= 0xC0:
            return back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
        if byte < 0x80:
            return False
    return False
