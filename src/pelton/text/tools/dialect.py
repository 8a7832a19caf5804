"""What a dialect of tool calls is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import ClassVar

from pelton.text.tools.reader import Reader, Scan, Sink


class Dialect(ABC):
    """One way in which models write calls."""

    name: ClassVar[str]
    markers: ClassVar[tuple[str, ...]]
    """Texts that it is written with, which are control tokens of some vocabularies."""

    @abstractmethod
    def parse(self, reader: Reader, sink: Sink, names: Collection[str]) -> Scan[None]:
        """Read an answer: calls of the tools in `names`, and the text around them. What it leaves is text."""
