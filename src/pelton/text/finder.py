"""Where a text has the texts of some tokens."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator


class Finder:
    """Finds names, however many there are: the time goes with how many lengths those have that begin alike."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        lengths: dict[str, set[int]] = {}
        for name in self._names:
            lengths.setdefault(name[0], set()).add(len(name))
        self._lengths = {initial: sorted(each, reverse=True) for initial, each in lengths.items()}
        initials = "".join(sorted(lengths))
        self._initial = re.compile(f"[{re.escape(initials)}]" if initials else "(?!)")

    def find(self, text: str) -> Iterator[tuple[int, str]]:
        """(place, name), in order: the longest at each place, none within another."""
        end = 0
        for match in self._initial.finditer(text):
            start = match.start()
            if start < end:
                continue
            for length in self._lengths[match[0]]:
                if (name := text[start : start + length]) in self._names:
                    end = start + length
                    yield start, name
                    break
