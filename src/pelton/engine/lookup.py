"""Prompt lookup: what followed, earlier in a sequence, the tokens that it ends in now.

An index of pairs of neighbouring tokens: for each pair the place where it stood last, and for each place the one
before it with the same pair, as LZ77 compressors have it. While a prediction holds, the match only grows, so that a
token costs a dictionary's look-up; where it fails, the few latest places of the new last pair are compared, and the
longest match among them wins, the latest one of equals. Where the pair is new, its last token alone is the match, where
it stood last: in text that has a form, such as JSON, much follows from one token.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

LONGEST = 32
"""Tokens of a match beyond which its length does not matter."""
MAX_PLACES = 8
"""Places that are compared to find the longest match."""
MAX_READ = 4096
"""Tokens that one call indexes at most, so that a long prompt does not hold up a step."""
MAX_TOKENS = 1 << 16
"""Tokens of a sequence that are indexed: about 150 bytes of memory each, and 100 for each different one."""
_SHIFT = 1 << 32


class Lookup:
    """The index of one sequence, which grows with it. `length`: tokens of the present match, 0: there is none."""

    __slots__ = ("_before", "_earlier", "_last", "_latest", "_num_read", "_place", "length")

    def __init__(self) -> None:
        self._latest: dict[int, int] = {}
        """Pair of tokens -> place of its second one."""
        self._earlier = array("i")
        """Per place the one before it with the same pair, or -1."""
        self._last: dict[int, int] = {}
        """Token -> its latest place."""
        self._before = -1
        """Where the token that was indexed last stood before, or -1."""
        self._num_read = 0
        self._place = 0
        """Of the token that is predicted."""
        self.length = 0

    def read(self, tokens: array[int], num_prompt: int, learn: Callable[[int, bool], None]) -> bool:
        """Take in what `tokens` has more than at the last call. `learn` is told of each new token behind the prompt
        that was predicted from a match of which length, and whether rightly. False: there is too much to read at once,
        and no match yet."""
        if len(tokens) > MAX_TOKENS:
            self.length = 0
            return False
        if self._num_read < num_prompt or len(tokens) - self._num_read > 2 * LONGEST:
            return self._skip(tokens)
        for place in range(self._num_read, len(tokens)):
            token = tokens[place]
            is_right = self.length > 0 and tokens[self._place] == token
            if self.length:
                learn(self.length, is_right)
            self._index(tokens, place)
            if is_right:
                self._place += 1
                self.length = min(self.length + 1, LONGEST)
            else:
                self._search(tokens, place)
        self._num_read = len(tokens)
        return True

    def _skip(self, tokens: array[int]) -> bool:
        """Read without predicting."""
        end = min(len(tokens), self._num_read + MAX_READ)
        for place in range(self._num_read, end):
            self._index(tokens, place)
        self._num_read, self.length = end, 0
        if end < len(tokens):
            return False
        self._search(tokens, end - 1)
        return True

    def _index(self, tokens: array[int], place: int) -> None:
        token = tokens[place]
        self._before = self._last.get(token, -1)
        self._last[token] = place
        if place == 0:
            self._earlier.append(-1)
            return
        pair = tokens[place - 1] * _SHIFT + token
        self._earlier.append(self._latest.get(pair, -1))
        self._latest[pair] = place

    def _search(self, tokens: array[int], last: int) -> None:
        """Find the longest match of the tokens up to `last`, the one that was indexed last."""
        self.length, self._place = self._longest(tokens, last, self._earlier[last], self._before)

    def _longest(self, tokens: array[int], last: int, place: int, before: int) -> tuple[int, int]:
        """Length and end of the longest match of the tokens up to `last`, whose last pair stood at `place` before, and
        the last token of it at `before`."""
        longest, end = 0, 0
        for _ in range(MAX_PLACES):
            if place < 0 or longest == LONGEST:
                break
            length = 2
            while length < min(LONGEST, place + 1) and tokens[place - length] == tokens[last - length]:
                length += 1
            if length > longest:
                longest, end = length, place + 1
            place = self._earlier[place]
        if not longest and before >= 0:
            longest, end = 1, before + 1
        return longest, end

    def match(self, text: array[int]) -> tuple[int, int]:
        """Length and end of the longest match of `text`, which goes on from what was read."""
        pair = text[-2] * _SHIFT + text[-1]
        return self._longest(text, len(text) - 1, self._latest.get(pair, -1), self._last.get(text[-1], -1))

    def ahead(self, tokens: array[int]) -> Ahead:
        """What is predicted behind `tokens`, which were read, and behind what may follow them."""
        return Ahead(self, tokens, self._place)

    def draft(self, tokens: array[int], num_tokens: int) -> array[int]:
        """What followed the match, `num_tokens` of it. Where that reaches the sequence's end, it goes on in the same
        period."""
        behind = tokens[self._place : self._place + num_tokens]
        return (behind * -(-num_tokens // len(behind)))[:num_tokens]


class Ahead:
    """A prediction that goes ahead of its sequence; the index stays as it is. `length`: tokens of the present match,
    0: there is none."""

    __slots__ = ("_lookup", "_place", "_text", "length")

    def __init__(self, lookup: Lookup, tokens: array[int], place: int) -> None:
        self._lookup = lookup
        self._text = tokens[:]
        self._place = place
        self.length = lookup.length

    @property
    def token(self) -> int:
        """What followed the match."""
        return self._text[self._place]

    def take(self, token: int) -> None:
        """Go on by a token, predicted or not."""
        is_right = self.length > 0 and self.token == token
        self._text.append(token)
        if is_right:
            self._place += 1
            self.length = min(self.length + 1, LONGEST)
        else:
            self.length, self._place = self._lookup.match(self._text)
