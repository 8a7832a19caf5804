"""The concrete data that models, backends and the reference share: weights, cache groups, one step's inputs.

They stand beside the vocabulary, below models and backends, which may not see each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast, get_args

import numpy as np
import numpy.typing as npt

from pelton.errors import ConfigError
from pelton.formats.quants import WeightType

BLOCK_TOKENS = 32
"""Tokens per block of KV memory."""
NULL_BLOCK = 0
"""Block 0 is never handed out: table entries of blocks that were given back point to it."""

KVType = Literal["f32", "bf16", "f16", "int8"]
I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]


def kv_type_named(name: str) -> KVType:
    """Raises ConfigError where there is none of that name."""
    for kv_type in get_args(KVType):
        if kv_type == name:
            return cast(KVType, kv_type)
    raise ConfigError(f"kv_dtype is {name!r}; there are: {', '.join(get_args(KVType))}", param="kv_dtype")


@dataclass(frozen=True)
class Weight:
    """One weight as the backend gets it: file bytes, not yet packed.

    `shape` is (rows, columns) or (columns,), rows first; stacked experts are (experts, rows, columns). `data` is a
    read-only uint8 view of the file. `row_order` (if given) says which file row becomes row i: the llama
    family's GGUF files store Q and K rows permuted. Small float weights may come already as float32 bytes.
    """

    name: str
    type: WeightType
    shape: tuple[int, ...]
    data: U8
    row_order: I32 | None = None


@dataclass(frozen=True)
class CacheGroup:
    """Layers with the same memory need. `num_layers` of them share one block table per sequence.

    A `latent` group's values are the first value_dim columns of its keys, not stored again. A `state` group has one
    block per sequence, the first of its table: num_kv_heads * head_dim float32 values per layer. A `cross` group
    holds an encoder's keys and values, a `none` group nothing.
    """

    kind: Literal["full", "window", "latent", "state", "cross", "none"]
    num_layers: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None = None


@dataclass(frozen=True)
class Batch:
    """One step's flat inputs. Sequence s owns rows seq_starts[s] .. seq_starts[s+1]-1, in position order.

    The slot of a token is derived: block `tables[g][s, p // 32]`, place `p % 32` in it. Keys of earlier
    positions must have been stored by earlier steps (or copied, or written).
    """

    ids: I32  # [T]
    positions: I32  # [T]
    seq_starts: I32  # [S + 1]
    tables: tuple[I32, ...]  # per cache group [S, max blocks]
    logit_rows: I32  # [R] rows of the step whose logits are sampled; a row may stand more than once (forks)
    num_pooled: int = 0  # the last so many of logit_rows are for their hidden states instead
    cross_lengths: I32 | None = None  # [S] keys that each sequence's encoder stored, where the model has one
