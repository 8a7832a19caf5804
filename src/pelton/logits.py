"""Logits processors: code of one's own between the model and the draw.

A package offers one by an entry point of the group `pelton.logits_processors`; what it names is called once, with the
size of the vocabulary, and gives a `LogitsProcessor`. Requests then ask for it by the entry point's name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


class LogitsRow(Protocol):
    """One row of logits: the distribution of one sequence's next token."""

    @property
    def args(self) -> Mapping[str, Any]:
        """What the request gave."""
        ...

    @property
    def prompt_ids(self) -> npt.NDArray[np.int32]:
        """The prompt's tokens."""
        ...

    @property
    def output_ids(self) -> npt.NDArray[np.int32]:
        """The tokens drawn so far."""
        ...


class LogitsProcessor(Protocol):
    """Changes logits. What it does may depend on nothing but what it is given: rows come again after a preemption, in
    other company, and with drafted tokens in their output that are not accepted later."""

    def check(self, args: Mapping[str, Any]) -> None:
        """Raise `ValueError` for arguments that make no sense: the request is refused with its message."""
        ...

    def apply(self, logits: npt.NDArray[np.float32], rows: Sequence[LogitsRow]) -> None:
        """Change logits [len(rows), vocab], the model's own or what the processor before made of them, in place. -inf
        bans a token. Penalties, biases, bans and filters follow. An exception ends the requests that cause it."""
        ...
