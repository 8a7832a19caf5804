"""From a checkpoint's tensors to a model's weights: names, shapes, order of rows.

Our names: embed, norm, head, and layers.N.X with X one of attn_norm, q, k, v, o (each with an optional _bias), q_norm,
k_norm, post_attn_norm, mlp_norm, gate, up, down, post_mlp_norm; router, gate_experts, up_experts, down_experts,
shared_gate, shared_up, shared_down, shared_router.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pelton.errors import FormatError, UnsupportedModel
from pelton.formats.checkpoint import Tensor
from pelton.formats.quants import WeightType, is_supported
from pelton.ops.data import I32, Weight


@dataclass(frozen=True)
class Expected:
    """One tensor that a family's files hold. `permuted_heads`: the file's rows are permuted within that many heads."""

    name: str
    file_name: str
    shape: tuple[int, ...]
    is_optional: bool = False
    permuted_heads: int = 0


def unpermute(num_rows: int, num_heads: int) -> I32:
    """Which file row is our row i, where the file pairs rows (2i, 2i+1) of a head for rope and we (i, i + d/2)."""
    rows = np.arange(num_rows, dtype=np.int32)
    return rows.reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _weight(file: str, tensor: Tensor, expected: Expected) -> Weight:
    if tensor.shape != expected.shape:
        raise FormatError(f"{file}: tensor {tensor.name!r} has shape {tensor.shape}, the model wants {expected.shape}")
    if not is_supported(tensor.type):
        raise UnsupportedModel(f"{file}: tensor {tensor.name!r}: weights of type {tensor.type.name} are not supported")
    order = unpermute(tensor.shape[0], expected.permuted_heads) if expected.permuted_heads else None
    if len(tensor.shape) > 1:
        return Weight(expected.name, tensor.type, tensor.shape, tensor.data, order)
    values = tensor.dequantize() if order is None else tensor.dequantize()[order]
    return Weight(expected.name, WeightType.F32, tensor.shape, values.view(np.uint8))


def collect(
    file: str, tensors: Mapping[str, Tensor], expected: Sequence[Expected], others: Sequence[str]
) -> dict[str, Weight]:
    """A model's weights by our names; vectors as float32. `others` are tensors that are used elsewhere.

    A missing, a surplus or a wrongly shaped tensor is a FormatError.
    """
    weights: dict[str, Weight] = {}
    for item in expected:
        tensor = tensors.get(item.file_name)
        if tensor is not None:
            weights[item.name] = _weight(file, tensor, item)
        elif not item.is_optional:
            raise FormatError(f"{file}: tensor {item.file_name!r} of shape {item.shape} is missing")
    surplus = set(tensors) - {item.file_name for item in expected} - set(others)
    if surplus:
        raise FormatError(f"{file}: the model has no place for tensor {min(surplus)!r} ({len(surplus)} such)")
    return weights
