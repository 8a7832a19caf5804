"""The draft model at work: what `draft_policy` has decided, run by run, before the target's step.

Each token is drawn as the target would draw it: with the key of its position, after the same penalties and masks, as
if the draft so far were output. So where the two models agree on the distribution they agree on the token, at any
temperature.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np

from pelton.backends.base import SampleArrays, Sampled
from pelton.config import EngineConfig
from pelton.engine import batch
from pelton.engine.batch import Row
from pelton.engine.constraints import Constraint, Masks
from pelton.engine.draft_policy import DraftPolicy
from pelton.engine.drafting import Drafting
from pelton.engine.kv_memory import KVMemory
from pelton.engine.pace import Pace, Shape
from pelton.engine.runner import Runner
from pelton.engine.sampling import Sampling
from pelton.engine.sequence import Sequence
from pelton.engine.shadows import Shadows
from pelton.engine.work import Work
from pelton.ops.data import Batch


@dataclass
class _Draft:
    """A draft under way."""

    sequence: Sequence
    shadow: Sequence
    constraint: Constraint | None
    """A copy, which goes ahead."""
    mu: float
    """Mirostat's, for its next token."""
    gain: float = 1.0
    """How likely all of it is right."""
    kinds: list[int] = field(default_factory=list)


def open_draft_model(
    runner: Runner, target: Runner, pace: Pace, config: EngineConfig, clock: Callable[[], float]
) -> DraftModel:
    """The draft model of `target`, whose steps `pace` knows."""
    memory = KVMemory(
        runner.windows,
        runner.num_blocks,
        max_chunk=runner.max_tokens,
        is_caching=config.prefix_cache,
        block_bytes=runner.plan.bytes_per_block,
    )
    weight = runner.plan.weights / max(1, target.plan.weights)
    shadows = Shadows(memory, runner.context)
    return DraftModel(runner, DraftPolicy(pace, shadows, weight=weight, max_tokens=runner.max_tokens), clock)


class DraftModel:
    """A loaded model that drafts for another one. `clock` gives seconds."""

    def __init__(self, runner: Runner, policy: DraftPolicy, clock: Callable[[], float]) -> None:
        self.runner = runner
        self.policy = policy
        self._memory = policy.shadows.memory
        self._clock = clock
        self._sampling = Sampling(runner.vocab_size)

    def run(self, work: Work, drafting: Drafting) -> None:
        """Make the drafts of a step, which then computes as many tokens more."""
        shape, began = work.shape, self._clock()
        moves, self._memory.moves = self._memory.moves, []
        self.runner.move(moves)
        shadows = {sequence: self._shadow(sequence) for sequence in drafting.chunks}
        drafts = [
            _Draft(each, shadows[each], None if each.constraint is None else each.constraint.fork(), each.mu)
            for each in drafting.depths
        ]
        active, seconds = self._first_run(drafting, drafts, shadows)
        while active := [draft for draft in active if self._goes_on(drafting, draft, seconds / len(active))]:
            active, seconds = self._next_run(drafting, active)
        for draft in drafts:
            if draft.sequence.draft:
                work.chunks[draft.sequence] += len(draft.sequence.draft)
        drafting.seconds = self._clock() - began
        self.policy.drafted(drafting, shape, {draft.sequence: draft.kinds for draft in drafts})

    def clear(self) -> None:
        """Forget all cached prefixes, after a step that failed."""
        self._memory.clear_cache()

    def _shadow(self, sequence: Sequence) -> Sequence:
        shadow = self.policy.shadows.get(sequence)
        assert shadow is not None
        return shadow

    def _goes_on(self, drafting: Drafting, draft: _Draft, seconds: float) -> bool:
        place = len(draft.kinds)
        return place < drafting.depths[draft.sequence] and self.policy.goes_on(
            drafting, draft.gain, place, draft.sequence, seconds
        )

    def _first_run(
        self, drafting: Drafting, drafts: list[_Draft], shadows: dict[Sequence, Sequence]
    ) -> tuple[list[_Draft], float]:
        """Read what is new; the first token of each draft."""
        chunks = {shadows[sequence]: num_tokens for sequence, num_tokens in drafting.chunks.items()}
        inputs, _ = batch.build(chunks, len(self._memory.windows))
        drawn = self._run(drafting, inputs, drafts)
        for shadow, num_tokens in chunks.items():
            self._memory.commit(shadow, num_tokens)
        return drawn

    def _next_run(self, drafting: Drafting, drafts: list[_Draft]) -> tuple[list[_Draft], float]:
        """One token more of each draft, after its last one."""
        positions = [draft.shadow.num_tokens + len(draft.shadow.draft) for draft in drafts]
        for draft in drafts:
            draft.shadow.draft.append(draft.sequence.draft[-1])
        count = np.arange(len(drafts) + 1, dtype=np.int32)
        inputs = Batch(
            ids=np.array([draft.shadow.draft[-1] for draft in drafts], np.int32),
            positions=np.array(positions, np.int32),
            seq_starts=count,
            tables=batch.tables([draft.shadow for draft in drafts], len(self._memory.windows)),
            logit_rows=count[:-1],
        )
        return self._run(drafting, inputs, drafts)

    def _run(self, drafting: Drafting, inputs: Batch, drafts: list[_Draft]) -> tuple[list[_Draft], float]:
        """Draw a token for each of `drafts`, the batch's rows. Those that may go on, and the seconds."""
        began = self._clock()
        pending = self.runner.submit(inputs)
        if not drafts:
            pending.wait()
            self._observe(inputs, began)
            return [], 0.0
        sampled = pending.sample(self._arrays(drafts))
        active = [draft for row, draft in enumerate(drafts) if self._take(drafting, draft, sampled, row)]
        return active, self._observe(inputs, began)

    def _observe(self, inputs: Batch, began: float) -> float:
        seconds = self._clock() - began
        num_read = sum((inputs.positions[inputs.seq_starts[1:] - 1] + 1).tolist())
        num_pairs = sum((inputs.positions + 1).tolist())
        self.policy.costs.observe(Shape(inputs.ids.size, inputs.logit_rows.size, num_read, num_pairs), seconds)
        return seconds

    def _arrays(self, drafts: list[_Draft]) -> SampleArrays:
        """How the token behind each draft is drawn: as the target draws it."""
        rows = [Row(draft.sequence, len(draft.sequence.draft)) for draft in drafts]
        arrays = self._sampling.arrays(rows, self._masks(drafts))
        return replace(
            arrays,
            chain=np.zeros_like(arrays.chain),
            mirostat_mu=np.array([draft.mu for draft in drafts], np.float32),
            num_logprobs=np.zeros_like(arrays.num_logprobs),
        )

    def _masks(self, drafts: list[_Draft]) -> Future[Masks] | None:
        constraints = [draft.constraint for draft in drafts if draft.constraint is not None]
        if not constraints:
            return None
        masks = np.zeros((len(constraints), -(-self.runner.vocab_size // 32)), np.uint32)
        for row, constraint in enumerate(constraints):
            constraint.fill(masks[row : row + 1], [])
        made: Future[Masks] = Future()
        made.set_result(masks)
        return made

    def _take(self, drafting: Drafting, draft: _Draft, sampled: Sampled, row: int) -> bool:
        """Add a token to a draft, if it may be there and is worth verifying. May another one follow?"""
        sequence, token = draft.sequence, int(sampled.ids[row])
        if sampled.errors[row] or token in sequence.group.end_ids:
            return False
        kind, chance = self.policy.guesses.sureness(sequence, math.exp(sampled.logprobs[row]))
        gain = draft.gain * chance
        if gain < drafting.least * drafting.row_seconds:
            return False
        if draft.constraint is not None:
            draft.constraint.accept(token)
            if draft.constraint.error is not None:
                return False
        sequence.draft.append(token)
        draft.gain, draft.mu = gain, float(sampled.mu[row])
        draft.kinds.append(kind)
        return draft.constraint is None or not draft.constraint.is_finished
