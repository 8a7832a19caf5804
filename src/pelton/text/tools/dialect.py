"""What a dialect of tool calls is."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import ClassVar

from pelton.text.tools.layout import Layout
from pelton.text.tools.reader import Reader, Scan, Sink


class Dialect(ABC):
    """One way in which models write calls."""

    name: ClassVar[str]
    markers: ClassVar[tuple[str, ...]]
    """Texts that it is written with, which are control tokens of some vocabularies."""
    layout: ClassVar[Layout]
    """What calls look like where they are enforced."""
    trigger: ClassVar[str] = ""
    """The marker with which calls begin, anywhere in a text; "": calls are all of the text, from its beginning."""

    @abstractmethod
    def parse(self, reader: Reader, sink: Sink, names: Collection[str]) -> Scan[None]:
        """Read an answer: calls of the tools in `names`, and the text around them. What it leaves is text."""

    def enforced(self) -> Dialect:
        """The same where calls are under a grammar: only what that holds to the tools' schemas is a call."""
        return self

    def call_id(self) -> str:
        """Of a new call."""
        return "call_" + secrets.token_hex(12)
