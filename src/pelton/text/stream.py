"""Token ids -> pieces of text, as they come.

The pieces of a stream, joined, are what decoding all its tokens at once gives, cut right before the first stop string.
No piece ends inside a character or holds a letter of a stop string. Each token costs time in proportion to its own
bytes, however long the text has become.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pelton.text.tokenizer import Tokenizer


class StopStrings:
    """Ends a text at the first of several strings, wherever the text is cut into pieces.

    The first is the one that is complete first; of those complete at the same character, the longest. The end of the
    text is held back as long as it may turn out to be the beginning of a stop string.
    """

    def __init__(self, stops: Iterable[str], *, include: bool = False) -> None:
        """`include`: the stop string itself is part of the text."""
        # The longest first, so that of several that end together the longest is found.
        self._matchers = [_Matcher(stop) for stop in sorted(stops, key=len, reverse=True) if stop]
        self._include = include
        self._held = ""
        self.found: str | None = None
        """The stop string that ended the text, once one has."""

    def feed(self, text: str) -> str:
        """The text that is now certain. After a stop string was found there is no more."""
        if self.found is not None:
            return ""
        if not self._matchers:
            return text
        before = len(self._held)
        text = self._held + text
        for at in range(before, len(text)):
            for matcher in self._matchers:
                if matcher.step(text[at]):
                    self.found, self._held = matcher.stop, ""
                    return text[: at + 1] if self._include else text[: at + 1 - len(matcher.stop)]
        keep = max(matcher.matched for matcher in self._matchers)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back: no more text comes."""
        held, self._held = self._held, ""
        return held


class _Matcher:
    """Knuth, Morris and Pratt's search for one string, a character at a time."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        """Length of the longest beginning of `stop` that the text ends with."""
        self._shorter = [0] * (len(stop) + 1)
        """Matched length -> length of the next shorter beginning that the same text ends with."""
        length = 0
        for at in range(1, len(stop)):
            while length and stop[at] != stop[length]:
                length = self._shorter[length]
            length += stop[at] == stop[length]
            self._shorter[at + 1] = length

    def step(self, character: str) -> bool:
        """Take one more character; whether the string is complete."""
        matched = self.matched
        while matched and self.stop[matched] != character:
            matched = self._shorter[matched]
        self.matched = matched + (self.stop[matched] == character)
        return self.matched == len(self.stop)


class TextStream:
    """One choice's tokens -> text."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special: bool = True,
        shown: Collection[int] = (),
        min_tokens: int = 0,
    ) -> None:
        """`skip_special`: control tokens give no text, unless they are among `shown`. `min_tokens`: in the text of the
        first so many tokens no stop string is looked for."""
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._shown = shown
        self._num_exempt = min_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = StopStrings(stop, include=include_stop)

    @property
    def stopped_by(self) -> str | None:
        """The stop string that has ended the text, if one has."""
        return self._stops.found

    def feed(self, token_id: int) -> str:
        """The text that is certain now that `token_id` has come; often empty."""
        is_exempt = self._num_exempt > 0
        self._num_exempt -= is_exempt
        if self._skip_special and self._tokenizer.is_control(token_id) and token_id not in self._shown:
            return ""
        text = self._decoder.decode(self._tokenizer.token_bytes(token_id))
        return text if is_exempt else self._stops.feed(text)

    def finish(self) -> str:
        """The rest: text that was held back, and U+FFFD for a character that was never completed."""
        return self._stops.feed(self._decoder.decode(b"", final=True)) + self._stops.flush()
