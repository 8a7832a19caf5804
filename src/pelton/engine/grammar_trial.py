"""Whether a grammar can be compiled in bounded time and memory, found out in a process that may be killed.

`llguidance` bounds most of its work, but not how regular expressions are combined: a schema of a kilobyte whose `allOf`
has a pattern per letter of the alphabet takes hours and all memory, in a call that nothing ends. So each grammar is
first tried in a child, whose limits the system holds; what passes is compiled again here.
"""

from __future__ import annotations

from contextlib import suppress

from pelton.confined import Confined, Limits, OverLimit, serve

LIMITS = Limits(cpu_seconds=3.0, memory_bytes=4 << 30)
"""Grammars that people write take milliseconds."""


class GrammarTrial:
    """The child, which is started when it is needed and ends with this process."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self._child = Confined(__name__, limits)

    def ends(self, definition: str) -> bool:
        """Does compiling this, in the library's form, end within the limits? Blocks until that is known. Raises
        `InternalError` where the child could not find out."""
        try:
            self._child.ask(definition.encode())
        except OverLimit:
            return False
        return True

    def close(self) -> None:
        """End the child; a trial that runs fails. From any thread."""
        self._child.close()


def tried(definition: bytes) -> bytes:
    """The child's part."""
    from llguidance import LLMatcher

    with suppress(Exception):  # what is wrong with it is found again by who asks
        LLMatcher.validate_grammar(definition.decode())
    return b""


if __name__ == "__main__":
    serve(tried)
