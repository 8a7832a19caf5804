"""The reference's cache: what `attend`, `remember` and `recur` keep between steps, in plain arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pelton.formats.quants import bf16_to_f32, f32_to_bf16
from pelton.ops.data import BLOCK_TOKENS, F32, I32, CacheGroup, KVType
from pelton.ops.numerics import BLOCK, quantize_activations

Floats = npt.NDArray[np.floating[Any]]


LARGEST: dict[KVType, float] = {"f32": 3.38953139e38, "bf16": 3.38953139e38, "f16": 65504.0, "int8": 3.38953139e38}
"""What is larger is stored as this, so that all that is stored is finite: bf16's largest, or the largest half."""


def round_kv(x: Floats, kv_type: KVType) -> Floats:
    """The nearest values that the cache type can hold, ties to even, in x's own dtype; NaN becomes 0.

    int8: as `quantize_activations` rounds each 32 columns of a token, its scale times its integers in float32.
    """
    largest = np.float32(LARGEST[kv_type])
    finite = np.clip(np.where(np.isnan(x), 0, x).astype(np.float32), -largest, largest)
    if kv_type == "bf16":
        finite = bf16_to_f32(f32_to_bf16(finite))
    elif kv_type == "f16":
        finite = finite.astype(np.float16)
    elif kv_type == "int8":
        finite = _round_blocks(finite)
    return finite.astype(x.dtype)


def _round_blocks(x: F32) -> F32:
    """[..., width] rounded to int8 in blocks of 32 columns, the last one perhaps shorter."""
    width = x.shape[-1]
    num_blocks = -(-width // BLOCK)
    padded = np.zeros((x.size // width, num_blocks * BLOCK), np.float32)
    padded[:, :width] = x.reshape(-1, width)
    values, scales = quantize_activations(padded)
    rounded = values.astype(np.float32).reshape(-1, num_blocks, BLOCK) * scales[..., None]
    return rounded.reshape(-1, num_blocks * BLOCK)[:, :width].reshape(x.shape)


class Memory:
    """Blocks of every cache group. Keys and values stand as [layers, blocks, BLOCK_TOKENS, kv heads, width]."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        num_blocks: Sequence[int],
        kv_type: KVType,
        dtype: npt.DTypeLike = np.float32,
    ) -> None:
        self.kv_type = kv_type
        self._keys: list[Floats] = []
        self._values: list[Floats] = []
        self._states: list[Floats] = []
        for group, blocks in zip(groups, num_blocks, strict=True):
            slots = 0 if group.kind in ("state", "none") else BLOCK_TOKENS
            shape = (group.num_layers, blocks, slots, group.num_kv_heads)
            keys = np.zeros((*shape, group.head_dim), dtype)
            self._keys.append(keys)
            is_latent = group.kind == "latent"
            self._values.append(
                keys[..., : group.value_dim] if is_latent else np.zeros((*shape, group.value_dim), dtype)
            )
            state = group.num_kv_heads * group.head_dim if group.kind == "state" else 0
            self._states.append(np.zeros((group.num_layers, blocks, state), dtype))

    def store(self, group: int, slot: int, table: I32, positions: I32, k: Floats, v: Floats | None) -> None:
        """[n, G, d], [n, G, dv]: round and keep the keys and values of one sequence's positions [n].

        Without v the values are a part of the keys.
        """
        blocks, places = table[positions // BLOCK_TOKENS], positions % BLOCK_TOKENS
        self._keys[group][slot, blocks, places] = round_kv(k, self.kv_type)
        if v is not None:
            self._values[group][slot, blocks, places] = round_kv(v, self.kv_type)

    def read(self, group: int, slot: int, table: I32, positions: I32) -> tuple[Floats, Floats]:
        """The keys [n, G, d] and values [n, G, dv] at one sequence's positions [n]."""
        blocks, places = table[positions // BLOCK_TOKENS], positions % BLOCK_TOKENS
        return self._keys[group][slot, blocks, places], self._values[group][slot, blocks, places]

    def state(self, group: int, slot: int, table: I32, shape: tuple[int, ...]) -> Floats:
        """One sequence's recurrent state, a view to be written in place."""
        return self._states[group][slot, table[0]].reshape(shape)
