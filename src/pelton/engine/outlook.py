"""What a model would take and give with so much memory: planned to the byte, nothing loaded."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from pelton.engine.budget import MemoryBudget, MemoryNeeds, Wishes, divide, peak_blocks
from pelton.engine.prepare import Prepared
from pelton.engine.protocol import Start
from pelton.errors import InsufficientMemory
from pelton.ops.data import BLOCK_TOKENS

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
FEW = 4
"""Streams that a recommended context has room for, where that is possible."""
SHORT = 4096
"""Below that, a longer context is worth keys and values of half the size."""
USUAL = 1024
"""Tokens of a usual stream: so many of them as fit are recommended to run at once."""


@dataclass(frozen=True)
class Advice:
    """Settings that suit the memory."""

    context: int
    kv_dtype: str
    max_sequences: int


@dataclass(frozen=True)
class Outlook:
    """`plan` is None where the model cannot be loaded; `problem` says why. `streams`: (tokens of each, how many of
    them fit at once), up to the context."""

    needs: MemoryNeeds
    trained: int
    """Tokens that the model was trained for, or the context that was asked for."""
    kv_dtype: str
    least: int
    usual: int
    """Bytes in all for the least and for the usual context."""
    plan: MemoryBudget | None
    problem: str
    streams: tuple[tuple[int, int], ...]
    advice: Advice | None
    """None: with no settings that were tried does it fit."""

    @property
    def kv_per_token(self) -> float:
        """Bytes of a token of a long text, where no window has passed."""
        return sum(self.needs.bytes_per_block) / BLOCK_TOKENS


def num_streams(needs: MemoryNeeds, num_blocks: tuple[int, ...], length: int) -> int:
    """Sequences of that many tokens that fit at once."""
    return min(
        needs.max_sequences,
        *(
            (count - 1) // peak_blocks(length, window, needs.max_chunk)
            for count, window in zip(num_blocks, needs.windows, strict=True)
        ),
    )


def look(start: Start, available: int) -> Outlook:
    """The outlook with `available` bytes. Raises what is wrong with the file or the settings."""
    prepared = Prepared(start)
    needs, wishes = prepared.memory, prepared.wishes
    plan, problem = None, ""
    try:
        plan = prepared.plan(available)
    except InsufficientMemory as error:
        problem = error.message
    streams: list[tuple[int, int]] = []
    if plan is not None:
        lengths = sorted({length for length in LENGTHS if length < plan.context} | {plan.context})
        streams = [(length, num_streams(needs, plan.num_blocks, length)) for length in lengths]
    return Outlook(
        needs=needs,
        trained=wishes.context,
        kv_dtype=start.config.kv_dtype,
        least=prepared.needs.least,
        usual=prepared.needs.usual,
        plan=plan,
        problem=problem,
        streams=tuple(streams),
        advice=_advise(start, prepared, available),
    )


def _advise(start: Start, prepared: Prepared, available: int) -> Advice | None:
    """The type that was asked for where that gives a context of some length; else the one of half the size."""
    config = start.config
    advice = _fitting(prepared, config.kv_dtype, available)
    if config.kv_dtype == "int8" or (advice is not None and advice.context >= min(SHORT, prepared.wishes.context)):
        return advice
    smaller = Prepared(msgspec.structs.replace(start, config=msgspec.structs.replace(config, kv_dtype="int8")))
    halved = _fitting(smaller, "int8", available)
    if halved is None or (advice is not None and advice.context >= halved.context):
        return advice
    return halved


def _fitting(prepared: Prepared, kv_dtype: str, available: int) -> Advice | None:
    """The longest context that has room for a few streams; where there is none, the longest for one."""
    trained = prepared.wishes.context
    contexts = sorted({length for length in LENGTHS if length < trained} | {trained}, reverse=True)
    for least_streams in (FEW, 1):
        for context in contexts:
            try:
                plan = divide(prepared.memory, Wishes(context, is_fixed=True), available, prepared.draft)
            except InsufficientMemory:
                continue
            if num_streams(prepared.memory, plan.num_blocks, context) >= min(
                least_streams, prepared.memory.max_sequences
            ):
                at_once = num_streams(prepared.memory, plan.num_blocks, min(context, USUAL))
                return Advice(context, kv_dtype, max(1, at_once))
    return None
