"""A Hugging Face state dict as a model's weights."""

from __future__ import annotations

import numpy as np
import torch

from pelton.formats.quants import WeightType
from pelton.ops.data import I32, Weight


def weight(name: str, values: np.ndarray, row_order: I32 | None = None) -> Weight:
    data = np.ascontiguousarray(values, np.float32)
    shape = data.shape if row_order is None else (len(row_order), *data.shape[1:])
    return Weight(name, WeightType.F32, shape, data.reshape(-1).view(np.uint8), row_order)


def state(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """Every tensor as an array; `model.` is dropped from names."""
    return {name.removeprefix("model."): t.detach().numpy() for name, t in model.state_dict().items()}
