"""The rules of `recur` in plain NumPy: each steps one sequence's tokens in order and updates its state in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from pelton.ops.spec import Rule

Array = npt.NDArray[Any]

_PER_TOKEN: dict[Rule, tuple[str, ...]] = {"conv": (), "selective_scan": ("dt", "B", "C")}


def state_shape(rule: Rule, params: dict[str, Array], width: int) -> tuple[int, ...]:
    """The shape of one sequence's state."""
    if rule == "conv":
        return (params["weight"].shape[1] - 1, width)
    return (width, params["a"].shape[1])


def rows_of(rule: Rule, params: dict[str, Array], rows: slice) -> dict[str, Array]:
    """The params as one sequence sees them: of per-token ones only its own rows; weights as arrays."""
    return {
        name: value[rows] if name in _PER_TOKEN[rule] else getattr(value, "values", value)
        for name, value in params.items()
    }


def conv(x: Array, params: dict[str, Array], state: Array) -> Array:
    """A causal convolution over time, each channel by itself; the state holds the last L-1 inputs, oldest first."""
    weight = params["weight"]  # [W, L]
    history = np.concatenate([state, x])
    state[:] = history[len(x) :]
    y = sum(weight[:, j] * history[j : j + len(x)] for j in range(weight.shape[1]))
    return np.asarray(y + params["bias"] if "bias" in params else y)


def selective_scan(x: Array, params: dict[str, Array], state: Array) -> Array:
    """Mamba's state space: decay and input depend on the token through dt, B and C."""
    a, d = params["a"], params["d"]
    y = np.empty_like(x)
    for t in range(len(x)):
        dt, B, C = params["dt"][t], params["B"][t], params["C"][t]
        state[:] = np.exp(dt[:, None] * a) * state + (dt * x[t])[:, None] * B
        y[t] = state @ C + d * x[t]
    return y


RULES: dict[Rule, Callable[[Array, dict[str, Array], Array], Array]] = {"conv": conv, "selective_scan": selective_scan}
