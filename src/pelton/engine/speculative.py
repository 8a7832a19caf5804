"""Drafted tokens: which of them the model would have drawn itself.

Every row of a draft is drawn with the key of its own position, as if the drafted tokens before it were accepted. Those
before the first that differs from what was drawn are; what was drawn in its place is what plain decoding draws.
"""

from __future__ import annotations

from pelton.backends.base import Sampled
from pelton.engine.batch import Row
from pelton.engine.sequence import Sequence


def count_accepted(rows: list[Row], sampled: Sampled) -> dict[Sequence, int]:
    """How many tokens of its draft each sequence keeps; those without a draft in the step are left out."""
    ids, errors = sampled.ids, sampled.errors
    accepted: dict[Sequence, int] = {}
    for i, (sequence, offset, _) in enumerate(rows):
        if offset > 0:
            kept = accepted.setdefault(sequence, 0)
            was_drawn = not errors[i - 1] and ids[i - 1] == sequence.draft[offset - 1]
            accepted[sequence] = kept + (was_drawn and kept == offset - 1)
    return accepted
