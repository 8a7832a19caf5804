"""What a draft model has of the sequences that it drafts for: a shadow of each, in KV memory of its own.

A shadow shares its sequence's tokens and has tables of its own. It is computed when drafts are wanted and not before,
so it lags behind, and what it has computed ahead of the tokens that were drawn is kept as far as it came true. Shadows
have a prefix cache among themselves: a conversation's next turn finds the last one there. One that has not been used
for a while gives way to one that needs the room; a sequence whose shadow finds none goes without drafts.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection

from pelton.engine.kv_memory import KVMemory
from pelton.engine.sequence import Sequence
from pelton.errors import InternalError

IDLE = 64
"""Steps without drafts after which a shadow gives way to others."""


class Shadows:
    """Those of all sequences, in the draft model's `memory`. `context`: tokens that one may hold."""

    def __init__(self, memory: KVMemory, context: int) -> None:
        self.memory = memory
        self.context = context
        self._shadows: OrderedDict[Sequence, Sequence] = OrderedDict()
        """Least recently used first."""
        self._used: dict[Sequence, int] = {}
        """In which turn each was used last."""
        self._turn = 0

    def turn(self) -> None:
        """One more step."""
        self._turn += 1

    def get(self, sequence: Sequence) -> Sequence | None:
        """The shadow of a sequence, up to date with what was drawn; None: it has none."""
        shadow = self._shadows.get(sequence)
        if shadow is not None and shadow.draft:
            self._follow(shadow)
        return shadow

    def _follow(self, shadow: Sequence) -> None:
        ahead, shadow.draft = shadow.draft, array("i")
        drawn = shadow.tokens[shadow.num_computed : shadow.num_computed + len(ahead)]
        right = (i for i, token in enumerate(ahead) if i == len(drawn) or token != drawn[i])
        self.memory.commit(shadow, next(right, len(ahead)))

    def start(self, sequence: Sequence) -> Sequence | None:
        """A shadow for a sequence without one, with what is cached for it; None: there is no room."""
        shadow = Sequence(sequence.group, sequence.choice)
        shadow.tokens = sequence.tokens
        if shadow.num_tokens + 1 > min(self.context, self.memory.capacity):
            return None
        memory, others = self.memory, self._shadows
        if not self._make_room(lambda: memory.can_admit(shadow, memory.match(shadow), others.values())):
            return None
        self.memory.attach(shadow, self.memory.match(shadow))
        self._shadows[sequence] = shadow
        self._use(sequence)
        return shadow

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make room for so many more tokens of a shadow, which is used now. False: there is none."""
        shadow = self._shadows[sequence]
        self._use(sequence)
        if not self.memory.has_place(shadow, num_tokens):
            if not self._make_room(lambda: self.memory.room(shadow) >= num_tokens):
                return False
            self.memory.grow(shadow, num_tokens)
        return True

    def forget(self, sequence: Sequence) -> None:
        """Give back what the shadow of a sequence has, if there is one; its tokens stay cached as long as they may."""
        if (shadow := self._shadows.pop(sequence, None)) is not None:
            del self._used[sequence]
            self.memory.publish_tail(shadow)
            self.memory.release(shadow)

    def _use(self, sequence: Sequence) -> None:
        self._used[sequence] = self._turn
        self._shadows.move_to_end(sequence)

    def _make_room(self, is_enough: Callable[[], bool]) -> bool:
        while not is_enough():
            oldest = next(iter(self._shadows), None)
            if oldest is None or self._turn - self._used[oldest] < IDLE:
                return False
            self.forget(oldest)
        return True

    def check(self, sequences: Collection[Sequence]) -> None:
        """Raise `InternalError` unless every block is accounted for. `sequences`: all that may have a shadow."""
        if not self._shadows.keys() <= set(sequences):
            raise InternalError("draft model: the shadow of a sequence has outlived it")
        self.memory.check(self._shadows.values())
