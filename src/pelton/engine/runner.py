"""A loaded model: one submission per step."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pelton.backends.base import Executor, Pending, StepProfile
from pelton.engine.background import Background
from pelton.engine.budget import MemoryBudget
from pelton.engine.moves import Copy, Move, Restore, Save
from pelton.formats.digest import ModelFile
from pelton.ops.data import I32, Batch


class Runner:
    """A loaded model. `windows` and `num_blocks` are per cache group; `plan` says what memory it takes."""

    def __init__(
        self,
        executor: Executor,
        *,
        files: tuple[ModelFile, ...],
        digest: str | None,
        windows: tuple[int | None, ...],
        vocab_size: int,
        width: int,
        max_tokens: int,
        max_sequences: int,
        plan: MemoryBudget,
        draft: Runner | None = None,
    ) -> None:
        self._executor = executor
        self.windows = windows
        self.num_blocks = plan.num_blocks
        self.vocab_size = vocab_size
        self.width = width
        self.context = plan.context
        self.max_tokens = max_tokens
        self.max_sequences = max_sequences
        self.plan = plan
        self.files = files
        self.digest = digest
        """Of the model's files; None while it is not known."""
        self.draft = draft
        """The model that drafts for this one."""

    @property
    def fingerprint(self) -> str | None:
        """The numerics fingerprint; None while the model's digest is not known."""
        return None if self.digest is None else self._executor.fingerprint(self.digest)

    def background(
        self, is_busy: Callable[[], bool], tell: Callable[[], None], after: Background | None = None
    ) -> Background:
        """Begin what is done beside the steps, `after` that of another model."""
        return Background(self.files, self._executor, self.digest, is_busy=is_busy, tell=tell, after=after)

    def move(self, moves: Iterable[Move]) -> None:
        """Make the moves, in order."""
        for move in moves:
            match move:
                case Copy():
                    self._executor.kv_copy(*move)
                case Save(group, block, place, saved):
                    saved.data[group, place] = self.read_block(group, block)
                case Restore(group, block, place, saved):
                    self.write_block(group, block, saved.data[group, place])

    def submit(self, batch: Batch) -> Pending:
        """Start a step."""
        return self._executor.submit(batch)

    def advance(self) -> None:
        """Make the last step, of one token and one row per sequence, the next one in place."""
        self._executor.advance()

    def proceed(self, ends: I32) -> bytes | None:
        """The same, and run and sample it: the ids that were drawn, as int32; None where any row has an error or drew
        one of `ends`."""
        return self._executor.proceed(ends)

    def read_block(self, group: int, block: int) -> bytes:
        """The backend's bytes of a block. From any thread."""
        return self._executor.kv_read(group, [block])

    def write_block(self, group: int, block: int, data: bytes) -> None:
        """Write back what `read_block` gave, to a block that no step touches meanwhile. From any thread."""
        self._executor.kv_write(group, [block], data)

    def profile(self) -> list[StepProfile]:
        """Where the time went; empty unless profiling is on."""
        return self._executor.profile()

    def close(self) -> None:
        """Give all memory back, that of the draft model, too."""
        if self.draft is not None:
            self.draft.close()
        self._executor.close()
