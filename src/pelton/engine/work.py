"""What one step computes: the scheduler makes it, and what it costs is told by its shape."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property

from pelton.engine.batch import scored
from pelton.engine.drafting import Drafting
from pelton.engine.moves import Move
from pelton.engine.pace import Shape, num_pairs
from pelton.engine.plain import PlainRun
from pelton.engine.sequence import Sequence


@dataclass(eq=False)
class Work:
    """One step: sequences with the number of tokens to compute for each, those of its draft included, after these
    copies of blocks.

    A step that only goes on with answers, a token each, is `steady`. While nothing else happens, one `Work` stands for
    one such step after the other: what is made from it for a step can be kept for the next one.
    """

    chunks: dict[Sequence, int] = field(default_factory=dict)
    moves: list[Move] = field(default_factory=list)
    num_bytes: int = 0
    """Of the moves."""
    drafting: Drafting | None = None
    """What the draft model does first, which is no part of the shape."""
    is_steady: bool = False
    plain: PlainRun | None = None
    """Of a steady step that is told plainly."""
    retabled: list[int] = field(default_factory=list)
    """Places, among the sequences of a steady step, of those whose tables have changed since the step before."""
    _shape: Shape | None = None
    """Of a steady step."""

    @cached_property
    def tenants(self) -> Counter[str]:
        """Whose the sequences are."""
        return Counter(sequence.group.tenant for sequence in self.chunks)

    @property
    def shape(self) -> Shape:
        """What its time depends on, until it is committed."""
        if self._shape is not None:
            return self._shape
        tokens = rows = read = pairs = 0  # a step has many sequences: no object for each
        for sequence, num_tokens in self.chunks.items():
            start = sequence.num_computed
            behind = start + num_tokens - len(sequence.tokens)
            if behind >= 0 and sequence.group.pool is None:
                rows += sequence.num_slots + behind
            if not sequence.is_scored:
                rows += len(scored(sequence, num_tokens))
            tokens += num_tokens
            read += start + num_tokens
            pairs += num_pairs(start, num_tokens)
        shape = Shape(tokens, rows, read, pairs, self.num_bytes)
        if self.is_steady:
            self._shape = shape
        return shape

    def repeat(self) -> None:
        """Stand for the next step: each sequence has a token more."""
        tokens, rows, read, pairs, _ = self.shape
        self._shape = Shape(tokens, rows, read + tokens, pairs + tokens)
