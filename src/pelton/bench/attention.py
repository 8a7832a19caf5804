"""Attention over the KV cache, with the heads of real models: one token after contexts of several lengths, and a
prompt.

A decoded token reads all keys and values before it once, so it is limited by memory; a prompt's rows share what they
read and are limited by the arithmetic: a multiply-add per key and column for the scores, and one for the values.
Layers follow each other as in a step, so that each one's keys and values come from memory and not from a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pelton import _core
from pelton.bench.limits import Limits, Times, measure
from pelton.bench.result import Result, judge
from pelton.ops.data import BLOCK_TOKENS, KVType

PROMPT_LAYERS = 4
"""Prompts are limited by the arithmetic: they need not stream from memory."""


@dataclass(frozen=True)
class Heads:
    """A model's attention."""

    model: str
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def kv_bytes(self, num_tokens: int, kv_type: KVType) -> int:
        """Of one layer's keys and values."""
        return num_tokens * _core.kv_block_bytes(num_layers=1, **self.shape, type=kv_type) // BLOCK_TOKENS

    @property
    def shape(self) -> dict[str, int]:
        """What a cache is told of them."""
        return {"num_kv_heads": self.num_kv_heads, "head_dim": self.head_dim, "value_dim": self.head_dim}

    def operations(self, num_keys: int) -> int:
        """Multiplications and additions of rows that see so many keys in all."""
        return 2 * 2 * self.num_heads * self.head_dim * num_keys


DEFAULT_HEADS = (Heads("SmolLM2-135M", 9, 3, 64), Heads("Qwen2.5-0.5B", 14, 2, 64), Heads("Llama-3.1-8B", 32, 8, 128))


@dataclass(frozen=True)
class Attention:
    """What to measure: each model's heads at each context, which is that of a decoded token, and for one prompt."""

    heads: Sequence[Heads] = DEFAULT_HEADS
    contexts: Sequence[int] = (256, 1024, 4096)
    prompt: int = 512
    kv_type: KVType = "f16"


def measure_heads(
    attention: Attention, heads: Heads, machine: _core.Machine, num_bytes: int, seconds: float, limits: Limits
) -> list[Result]:
    """One model's heads: a line per context, over as many layers as have `num_bytes` together, and one for a
    prompt. Times are of one layer."""
    points = [
        (f"decode at {length}", length - 1, length, max(1, num_bytes // heads.kv_bytes(length, attention.kv_type)))
        for length in attention.contexts
    ]
    points.append((f"prompt of {attention.prompt}", 0, attention.prompt, PROMPT_LAYERS))
    return [
        judge(
            "attention",
            f"{heads.model} {heads.num_heads}/{heads.num_kv_heads}x{heads.head_dim} {attention.kv_type}, {what}",
            end - begin,
            _time_layer(heads, attention.kv_type, machine, begin, end, num_layers, seconds),
            num_bytes=heads.kv_bytes(end, attention.kv_type),
            operations=heads.operations(sum(range(begin + 1, end + 1))),
            limits=limits,
            peak=limits.float32,
        )
        for what, begin, end, num_layers in points
    ]


def _time_layer(
    heads: Heads, kv_type: KVType, machine: _core.Machine, begin: int, end: int, num_layers: int, seconds: float
) -> Times:
    """Of one layer, over the positions [begin, end) of one sequence."""
    table = np.arange(1, -(-end // BLOCK_TOKENS) + 1, dtype=np.int32)
    cache = _core.KVCache(num_layers=num_layers, **heads.shape, type=kv_type, num_blocks=len(table) + 1)

    def attend(begin: int, end: int) -> Callable[[], None]:
        rng = np.random.default_rng(0)
        q = rng.standard_normal((end - begin, heads.num_heads * heads.head_dim), np.float32)
        k, v = rng.standard_normal((2, end - begin, heads.num_kv_heads * heads.head_dim), np.float32)
        return lambda: _core.attend_alone(
            machine=machine,
            cache=cache,
            slot=0,
            q=q,
            k=k,
            v=v,
            out=np.zeros_like(q),
            positions=np.arange(begin, end, dtype=np.int32),
            seq_starts=np.array([0, end - begin], np.int32),
            tables=table[None],
            num_heads=heads.num_heads,
            scale=heads.head_dim**-0.5,
            repeat=num_layers,
        )

    attend(0, BLOCK_TOKENS if len(table) > 1 else end)()
    cache.write(table, cache.read(table[:1]) * len(table))
    times = measure(attend(begin, end), seconds)
    return Times(times.median / num_layers, times.best / num_layers)
