"""How memory is divided, exactly and before anything is loaded: weights, working memory, KV blocks per cache group."""

from __future__ import annotations

from dataclasses import dataclass

from pelton.errors import InsufficientMemory
from pelton.ops.data import BLOCK_TOKENS

NOMINAL_TOKENS = 4096
"""The groups' shares are such that sequences of this length fill them all at once."""
MIN_CONTEXT = 512
"""A context that the user did not ask for is cut to fit the memory, but not below this."""
SHARE = 4
"""KV memory takes this part of what is free, unless it is set."""
SHARED_CONTEXT = 8192
"""Of a model that leaves memory to others: it has at least so many tokens before it takes more than its part."""
DRAFT_SHARE = 4
"""A draft model takes this part of KV memory at most, unless it holds fewer than `MIN_CONTEXT` tokens then."""


def peak_blocks(num_tokens: int, window: int | None, max_chunk: int) -> int:
    """The most blocks of a cache group that a lone sequence holds at once on its way to `num_tokens` tokens."""
    blocks = -(-num_tokens // BLOCK_TOKENS)
    if window is None:
        return blocks
    return min(blocks, -(-(window + max_chunk) // BLOCK_TOKENS) + 1)


@dataclass(frozen=True)
class MemoryNeeds:
    """What a model takes. `windows` and `bytes_per_block` are per cache group; `max_chunk` is the most tokens that
    one step adds to a sequence."""

    weights: int
    arena: int
    bytes_per_block: tuple[int, ...]
    windows: tuple[int | None, ...]
    max_chunk: int
    max_sequences: int

    def kv_bytes(self, num_blocks: tuple[int, ...]) -> int:
        """Bytes of so many blocks."""
        return sum(count * size for count, size in zip(num_blocks, self.bytes_per_block, strict=True))

    def kv_of_one(self, context: int) -> int:
        """Bytes for one sequence at a time."""
        return self.kv_bytes(self.blocks_of_one(context))

    def blocks_of_one(self, context: int) -> tuple[int, ...]:
        """Blocks, the null block included, for one sequence at a time."""
        return tuple(peak_blocks(context, window, self.max_chunk) + 1 for window in self.windows)


@dataclass(frozen=True)
class DraftNeeds:
    """What a draft model takes. `context`: tokens that a sequence may hold in it."""

    memory: MemoryNeeds
    context: int

    def part(self, target: MemoryNeeds, budget: int, context: int) -> int:
        """Its part of so many bytes of KV memory: it holds as many tokens as the model that it drafts for, if that is
        not over its share. `context` is that of the model."""
        ours, theirs = sum(self.memory.bytes_per_block), sum(target.bytes_per_block)
        return max(min(budget // DRAFT_SHARE, budget * ours // (ours + theirs)), self._least(context))

    def beside(self, target: MemoryNeeds, kv: int, context: int) -> int:
        """Bytes of KV memory of which its part leaves so many."""
        ours, theirs = sum(self.memory.bytes_per_block), sum(target.bytes_per_block)
        return max(kv + min(-(-kv // (DRAFT_SHARE - 1)), -(-kv * ours // theirs)), kv + self._least(context))

    def _least(self, context: int) -> int:
        return self.memory.kv_of_one(min(self.context, context, MIN_CONTEXT))


@dataclass(frozen=True)
class MemoryBudget:
    """The division. All bytes."""

    weights: int
    arena: int
    kv: int
    num_blocks: tuple[int, ...]
    context: int
    swap: int = 0
    """At most, for preempted sequences in host memory."""
    bytes_per_block: tuple[int, ...] = ()
    draft: MemoryBudget | None = None
    """What a draft model takes beside it."""

    @property
    def total(self) -> int:
        """All of it, and of the draft model's."""
        own = self.weights + self.arena + self.kv + self.swap
        return own if self.draft is None else own + self.draft.total

    def __str__(self) -> str:
        own = (
            f"weights {_mib(self.weights)}, working memory {_mib(self.arena)}, KV memory {_mib(self.kv)} "
            f"({', '.join(map(str, self.num_blocks))} blocks) and up to {_mib(self.swap)} of host memory for preempted "
            f"sequences, context {self.context} tokens"
        )
        return own if self.draft is None else f"{own}; draft model: {self.draft}"


@dataclass(frozen=True)
class Wishes:
    """What is set about KV memory. `kv_memory`: bytes for blocks, 0: decide. `context`: tokens that a sequence may
    hold; unless that `is_fixed` it is cut to what fits. `swap_memory`: bytes for preempted sequences, of which no more
    are taken than KV memory has or are left. `is_shared`: memory is left to other models."""

    context: int
    is_fixed: bool = False
    kv_memory: int = 0
    swap_memory: int = 0
    is_shared: bool = False

    @property
    def usual_context(self) -> int:
        """Tokens that are made room for before others get memory."""
        return min(self.context, SHARED_CONTEXT) if self.is_shared and not self.is_fixed else self.context

    @property
    def least_context(self) -> int:
        """Tokens that there must be room for."""
        return self.context if self.is_fixed else min(self.context, MIN_CONTEXT)


def required(needs: MemoryNeeds, wishes: Wishes, draft: DraftNeeds | None = None) -> tuple[int, int]:
    """Bytes that `divide` must have at least, and those that it needs for the usual context."""
    base = needs.weights + needs.arena
    if draft is not None:
        base += draft.memory.weights + draft.memory.arena
    least, usual = (
        base + (wishes.kv_memory or _kv_of_one(needs, draft, wishes, context))
        for context in (wishes.least_context, wishes.usual_context)
    )
    return least, usual


def _kv_of_one(needs: MemoryNeeds, draft: DraftNeeds | None, wishes: Wishes, context: int) -> int:
    kv = needs.kv_of_one(context)
    return kv if draft is None else draft.beside(needs, kv, wishes.context)


def divide(needs: MemoryNeeds, wishes: Wishes, available: int, draft: DraftNeeds | None = None) -> MemoryBudget:
    """Divide `available` bytes, of which KV memory is the draft model's in part, if there is one. Raises
    InsufficientMemory with the numbers."""
    left = available - needs.weights - needs.arena
    if draft is not None:
        left -= draft.memory.weights + draft.memory.arena
    context = wishes.context
    usual = _kv_of_one(needs, draft, wishes, wishes.usual_context)
    budget = wishes.kv_memory or max(0, min(left, max(left // SHARE, usual)))
    if left < budget or left <= 0:
        raise InsufficientMemory(
            f"the model needs {_mib(needs.weights)} for weights, {_mib(needs.arena)} of working memory and "
            f"{_mib(budget)} of KV memory, {_beside(draft)}but only {_mib(available)} are free"
        )
    beside = None
    if draft is not None:
        beside = _divide_draft(draft, draft.part(needs, budget, context), context)
        budget, left = budget - beside.kv, left - beside.kv
    longest = _longest(needs, budget, context)
    if longest < wishes.least_context:
        raise InsufficientMemory(
            f"a context of {context} tokens needs {_mib(needs.kv_of_one(context))} of KV memory, "
            f"but there are {_mib(budget)}, which hold {longest} tokens"
        )
    num_blocks = _share(needs, budget, longest)
    kv = needs.kv_bytes(num_blocks)
    swap = min(wishes.swap_memory, kv, left - kv)
    return MemoryBudget(needs.weights, needs.arena, kv, num_blocks, longest, swap, needs.bytes_per_block, beside)


def _beside(draft: DraftNeeds | None) -> str:
    if draft is None:
        return ""
    return f"its draft model {_mib(draft.memory.weights)} and {_mib(draft.memory.arena)} beside that KV memory, "


def _divide_draft(draft: DraftNeeds, budget: int, context: int) -> MemoryBudget:
    """So many bytes of KV memory as the draft model's; they hold a sequence of the least length."""
    needs = draft.memory
    longest = _longest(needs, budget, min(draft.context, context))
    num_blocks = _share(needs, budget, longest)
    kv = needs.kv_bytes(num_blocks)
    return MemoryBudget(needs.weights, needs.arena, kv, num_blocks, longest, 0, needs.bytes_per_block)


def _longest(needs: MemoryNeeds, budget: int, context: int) -> int:
    """The longest lone sequence that fits, up to `context`; a multiple of the block's length where it is cut."""
    if needs.kv_of_one(context) <= budget:
        return context
    low, high = 0, -(-context // BLOCK_TOKENS)  # in blocks: low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        fits = needs.kv_of_one(middle * BLOCK_TOKENS) <= budget
        low, high = (middle, high) if fits else (low, middle)
    return low * BLOCK_TOKENS


def _share(needs: MemoryNeeds, budget: int, context: int) -> tuple[int, ...]:
    """Blocks per group: enough for one sequence of `context`, then in the proportion of sequences of nominal length,
    no more than all sequences could use at full context."""
    least = needs.blocks_of_one(context)
    most = tuple((count - 1) * needs.max_sequences + 1 for count in least)
    nominal = needs.blocks_of_one(min(context, NOMINAL_TOKENS))

    def at(scale: int) -> tuple[int, ...]:
        """The division where groups have `scale` 65536ths of what one sequence of nominal length takes."""
        return tuple(
            min(max(low, size * scale >> 16), high) for low, size, high in zip(least, nominal, most, strict=True)
        )

    low, high = 0, max(most) << 16
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if needs.kv_bytes(at(middle)) <= budget else (low, middle)
    return at(low)


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"
