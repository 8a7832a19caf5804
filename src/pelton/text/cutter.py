"""Tokens that are found in text before anything else: what lies between them is encoded part by part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from pelton.text.finder import Finder


class Cutter:
    """Cuts texts at user-defined tokens: the leftmost first, of those at one place the longest."""

    def __init__(self, user_defined: Mapping[str, int]) -> None:
        """Text -> id."""
        self._ids = user_defined
        self._find = Finder(user_defined).find

    def encode(self, texts: Sequence[str], encode: Callable[[Sequence[str]], list[list[int]]]) -> list[list[int]]:
        """The ids of texts whose other parts, none of them empty, are encoded by `encode`."""
        cuts = [self._split(text) for text in texts]
        encoded = iter(encode([part for cut in cuts for part in cut[::2] if part]))
        return [self._join(cut, encoded) for cut in cuts]

    def _split(self, text: str) -> list[str]:
        """Other parts, which may be empty, and tokens in turn."""
        parts: list[str] = []
        end = 0
        for start, name in self._find(text):
            parts += (text[end:start], name)
            end = start + len(name)
        return [*parts, text[end:]]

    def _join(self, cut: Sequence[str], encoded: Iterator[list[int]]) -> list[int]:
        ids: list[int] = []
        for i, part in enumerate(cut):
            if i % 2:
                ids.append(self._ids[part])
            elif part:
                ids += next(encoded)
        return ids
