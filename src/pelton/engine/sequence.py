"""What the engine knows of a request: a group of sequences, one per choice.

Lengths are derived, never stored twice. Two counters say where a sequence stands, whether it is in prefill, decodes,
was found in the prefix cache or was preempted: `num_tokens`, what it consists of (prompt and output), and
`num_computed`, how many of these are in KV memory. A step computes some of the rest; when it computes the last
one, the next token is drawn.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Literal

from pelton.engine.beam import Beams
from pelton.engine.pooling import Pool
from pelton.request import EngineRequest

if TYPE_CHECKING:
    from pelton.engine.constraints import Constraint
    from pelton.engine.drafter import Drafter
    from pelton.engine.moves import Saved
    from pelton.engine.penalties import History
    from pelton.engine.prefix_cache import Node

URGENT = -(1 << 63)
"""The rank of a sequence whose turn came because it had waited too long: before any priority."""

State = Literal["compiling", "waiting", "loading", "running", "forking", "parked", "finished"]


class Sequence:
    """One choice of a request, or a slot of its beam search. `compiling`: its grammar is not ready, and the scheduler
    does not know it yet. `loading`: its beginning is being read from disk. `forking`: it shares its parent's prefill
    and starts when that is done. `parked`: a slot that the scheduler does not know for now."""

    __slots__ = (  # what a step touches of a sequence lies together
        "children", "choice", "constraint", "draft", "drafter", "group", "history", "max_length", "mu", "node",
        "num_cached", "num_computed", "num_fetches", "num_prompt", "rank", "saved", "state", "tables", "tokens",
    )  # fmt: skip

    def __init__(self, group: SequenceGroup, choice: int) -> None:
        self.group = group
        self.choice = choice
        self.rank = group.request.priority
        """The lower, the more urgent."""
        self.state: State = "waiting"
        self.tokens = array("i", group.request.prompt_ids)
        self.num_prompt = len(self.tokens)
        self.max_length = self.num_prompt + (group.request.sampling.max_tokens or 0)
        """Tokens, prompt and output, at which it ends."""
        self.draft = array("i")
        """A guess at its next tokens, for one step: none of `end_ids`, and fewer than it may still draw."""
        self.drafter: Drafter | None = None
        """What drafts are made from, where it has had one or might have."""
        self.num_computed = 0
        self.num_cached = 0
        """Tokens that the prefix cache gave when it was last admitted."""
        self.num_fetches = 0
        """How often it has waited for the disk."""
        self.tables: tuple[array[int], ...] = ()
        """Per cache group the block ids by position // BLOCK_TOKENS; all tables are equally long."""
        self.node: Node | None = None
        """Deepest node of the prefix cache that its table agrees with; None: the root."""
        self.history: History | None = None
        """Token counts for the penalties, where it has any."""
        self.mu = 2 * group.request.sampling.mirostat_tau
        """Mirostat's bound on the surprise of the next token, in bits."""
        self.saved: Saved | None = None
        """What it had in KV memory when it was preempted, where that was copied to host memory."""
        self.constraint: Constraint | None = None
        """Where it stands in its grammar, where it has one."""
        self.children: list[Sequence] = []
        """The choices that fork from it when its prefill is done."""

    @property
    def order(self) -> tuple[int, int, int]:
        """The most urgent first, then the oldest."""
        return self.rank, self.group.arrival, self.choice

    @property
    def age(self) -> tuple[int, int]:
        """The oldest first."""
        return self.group.arrival, self.choice

    @property
    def is_scored(self) -> bool:
        """Is nobody to be told logprobs of its prompt any more?"""
        return self.group.num_scored >= self.num_prompt

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        return len(self.tokens)

    @property
    def num_new(self) -> int:
        """Tokens that are still to be computed before the next one can be drawn."""
        return len(self.tokens) - self.num_computed

    @property
    def num_output(self) -> int:
        """Tokens drawn so far; the position of the next one in the output."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_slots(self) -> int:
        """Sequences that it stands for: itself and the choices that will fork from it."""
        return 1 + len(self.children)


class SequenceGroup:
    """A request and its choices."""

    __slots__ = (
        "arrival", "arrived_at", "beams", "drawn_at", "dry_breakers", "end_ids", "is_accepted", "num_cached",
        "num_ends", "num_logprobs", "num_scored", "pool", "request", "sequences", "started_at", "tenant",
        "warnings",
    )  # fmt: skip

    def __init__(self, request: EngineRequest, arrival: int) -> None:
        self.request = request
        self.arrival = arrival
        self.arrived_at = self.started_at = 0.0
        """When it came, and when its first step began, on the engine's clock."""
        self.drawn_at: float | None = None
        """When the step ended that has drawn its first token; None before."""
        self.is_accepted = False
        """Has its client been told that it is?"""
        self.warnings: tuple[str, ...] = ()
        """What of its grammar is not enforced."""
        self.tenant = request.tenant
        self.num_cached: int | None = None
        """Prompt tokens that came from the prefix cache; None until the first step."""
        self.num_logprobs = request.sampling.logprobs
        self.num_scored = len(request.prompt_ids) if request.sampling.prompt_logprobs is None else 1
        """Tokens of the prompt whose logprobs are known, or nobody asks for; the first one has none."""
        self.pool = None if request.pooling is None else Pool(request.pooling, len(request.prompt_ids))
        """Where its vector comes together, where that is what is asked for: nothing is drawn then."""
        self.num_ends = 0
        """Choices that a token has ended, which is none of theirs."""
        self.end_ids = frozenset(request.sampling.stop_token_ids) | frozenset(
            () if request.sampling.ignore_eos else request.end_ids
        )
        """The tokens that end a choice."""
        self.dry_breakers = frozenset(request.dry_breaker_ids)
        """The tokens that a repeat does not go across."""
        self.beams = Beams(request.sampling, self.end_ids) if request.sampling.use_beam_search else None
        """The search whose hypotheses the sequences hold, where it is one."""
        num_sequences = request.sampling.n if self.beams is None else self.beams.width
        self.sequences = [Sequence(self, choice) for choice in range(num_sequences)]
        first, *others = self.sequences
        first.children = others
        for sequence in others:
            sequence.state = "forking"

    def parent_of(self, child: Sequence) -> Sequence:
        """The choice that a choice in state `forking` will fork from."""
        return next(sequence for sequence in self.sequences if child in sequence.children)

    @property
    def num_completion(self) -> int:
        """Tokens drawn over all choices, those that ended a choice included; of a beam search, those of its slots."""
        return self.num_ends + sum(sequence.num_output for sequence in self.sequences)

    @property
    def has_started(self) -> bool:
        """Has any of it been computed?"""
        return self.num_cached is not None

    @property
    def is_finished(self) -> bool:
        """Have all choices ended?"""
        return all(sequence.state == "finished" for sequence in self.sequences)
