"""The drafts of a step: who is asked for them, what there is room for, and what of them sequences keep."""

from __future__ import annotations

from array import array

from pelton.engine.batch import num_drafted
from pelton.engine.drafting import Drafting
from pelton.engine.kv_memory import KVMemory
from pelton.engine.sequence import Sequence
from pelton.engine.speculative import Speculation
from pelton.engine.work import Work


class StepDrafts:
    """Those of an engine whose steps have `max_tokens` at most. `speculation` makes them, None: nobody does. They get
    what memory is left, and nobody is preempted for them."""

    def __init__(self, memory: KVMemory, speculation: Speculation | None, max_tokens: int) -> None:
        self.speculation = speculation
        self.num_drafted = self.num_accepted = 0
        self._model = None if speculation is None else speculation.model
        self._memory = memory
        self._max_tokens = max_tokens

    def asked(self, work: Work) -> Speculation | None:
        """Who is to be asked for drafts for a step of sequences that decode; None: nobody."""
        is_idle = self.speculation is None or self.speculation.rests(len(work.chunks))
        return None if is_idle else self.speculation

    def give(self, work: Work, speculation: Speculation) -> None:
        """Let sequences that decode try drafts."""
        spare = self._max_tokens - len(work.chunks)
        work.drafting = speculation.draft(work.shape, work.chunks, spare)
        for sequence in work.chunks:
            if sequence.draft:
                num_drafted = min(len(sequence.draft), spare, self._memory.room(sequence) - 1)
                del sequence.draft[num_drafted:]
                self._memory.grow(sequence, 1 + num_drafted)
                work.chunks[sequence] += num_drafted
                spare -= num_drafted
        if work.drafting is not None and not self._give_depths(work.drafting, spare):
            work.drafting = None

    def _give_depths(self, drafting: Drafting, spare: int) -> bool:
        """Room for the drafts that the draft model is to make. False: nothing is left for it to do."""
        for sequence, depth in list(drafting.depths.items()):
            depth = min(depth, spare, self._memory.room(sequence) - 1)
            if depth > 0:
                drafting.depths[sequence] = depth
                self._memory.grow(sequence, 1 + depth)
                spare -= depth
            else:
                del drafting.depths[sequence], drafting.chunks[sequence]
        return bool(drafting.chunks)

    def keep(self, sequence: Sequence, num_tokens: int, num_kept: int) -> int:
        """A step has computed so many tokens of a sequence, and `num_kept` of its draft become its own; the others are
        forgotten. How many of what was computed are its own."""
        drafted = num_drafted(sequence, num_tokens)
        self.num_drafted += drafted
        self.num_accepted += num_kept
        if self._model is not None:
            self._model.tell(sequence, num_kept)
        sequence.tokens += sequence.draft[:num_kept]
        sequence.draft = array("i")
        return num_tokens - (drafted - num_kept)
