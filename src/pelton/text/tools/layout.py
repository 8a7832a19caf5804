"""How a dialect's calls look, to the letter: what grammars of them are made from."""

from __future__ import annotations

import json
from typing import NamedTuple

NAME = "{name}"
"""Stands for the tool's name."""


class Layout(NamedTuple):
    """Head, calls and tail. A call is its opening, the arguments as JSON, and its closing.

    With `is_python`, the arguments are written as Python's keyword arguments.
    """

    head: str
    opening: str
    closing: str
    between: str
    tail: str
    is_python: bool = False

    def opened(self, name: str) -> str:
        """A call's opening."""
        quoted = json.dumps(name)[1:-1]
        return self.opening.replace(NAME, quoted)
