"""Every op in plain NumPy: the slow version that is the definition.

`Ops` computes eagerly over one step's `Batch`. Give it the batch and the `Memory` that holds earlier steps, and
call a model's step function with it: chunks, batches and decodes then work as in any backend.

`linear` has a mode per kernel family (`numerics`), chosen by weight type; with `float` for all types it is what other
implementations compute from the same dequantised weights. `bf16-unordered` has the bf16 family's operands, but sums
their products in whatever order the matrix library takes: not the same bits, but fast enough for whole texts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pelton.formats.quants import WeightType, dequantize, row_bytes
from pelton.ops import numerics, recurrence
from pelton.ops.data import I32, Batch, Weight
from pelton.ops.memory import Floats, Memory
from pelton.ops.spec import Activation, AttendSpec, RopeSpec, Rule

Array = npt.NDArray[Any]
Family = Literal["float", "int8", "bf16", "bf16-unordered"]


class Matrix:
    """A weight as the reference holds it: file bytes, turned to floats on first use and kept.

    `shape` is (rows, columns) or (experts, rows, columns); vectors are plain arrays (see `bind`).
    """

    def __init__(self, weight: Weight, dtype: npt.DTypeLike) -> None:
        self.weight = weight
        self.shape = weight.shape
        self._dtype = dtype
        self._values: Floats | None = None
        self._operands: Floats | None = None

    @property
    def rows(self) -> npt.NDArray[np.uint8]:
        """File bytes, [..., rows, row bytes], in the model's order."""
        rows = self.weight.data.reshape(-1, row_bytes(self.weight.type, self.shape[-1]))
        rows = rows if self.weight.row_order is None else rows[self.weight.row_order]
        return rows.reshape(*self.shape[:-1], -1)

    @property
    def values(self) -> Floats:
        """The dequantised values, of `shape`."""
        if self._values is None:
            values = dequantize(self.weight.type, self.rows.reshape(-1, self.rows.shape[-1]))
            self._values = values.astype(self._dtype, copy=False).reshape(self.shape)
        return self._values

    @property
    def operands(self) -> Floats:
        """The values as the bf16 family computes with them, float32 of `shape`."""
        if self._operands is None:
            rows = self.rows
            values = numerics.bf16_values(self.weight.type, rows.reshape(-1, rows.shape[-1]))
            self._operands = values.reshape(self.shape)
        return self._operands


def bind(weights: Mapping[str, Weight], dtype: npt.DTypeLike = np.float32) -> dict[str, Matrix | Floats]:
    """A model's weights as this module's ops take them."""
    bound: dict[str, Matrix | Floats] = {}
    for name, weight in weights.items():
        if len(weight.shape) > 1:
            bound[name] = Matrix(weight, dtype)
        else:
            values = dequantize(weight.type, weight.data.reshape(1, -1))[0]
            bound[name] = (values if weight.row_order is None else values[weight.row_order]).astype(dtype)
    return bound


def _erf(x: Array) -> Array:
    return np.vectorize(math.erf, otypes=[x.dtype])(x)


def _gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _sigmoid(x: Array) -> Array:
    return 0.5 * (1 + np.tanh(0.5 * x))


ACTIVATIONS: dict[Activation, Callable[[Array], Array]] = {
    "silu": lambda x: x * _sigmoid(x),
    "gelu_tanh": _gelu_tanh,
    "gelu": lambda x: 0.5 * x * (1 + _erf(x / math.sqrt(2))),
    "relu": lambda x: np.maximum(x, 0),
    "sigmoid": _sigmoid,
    "softplus": lambda x: np.logaddexp(x, np.zeros_like(x)),
}


def softmax(x: Array) -> Array:
    """Over the last axis; -inf gives an exact zero."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def _heads(x: Array, num_heads: int) -> Array:
    """[n, H*d] -> [n, H, d]."""
    return x.reshape(x.shape[0], num_heads, -1)


def _visible(queries: I32, keys: I32, spec: AttendSpec) -> npt.NDArray[np.bool_]:
    """[n, L]: may the token at position queries[i] see the key at position keys[j]?"""
    if spec.mask != "causal":
        return np.ones((queries.size, keys.size), bool)
    distance = queries[:, None] - keys[None, :]
    return (distance >= 0) & (distance < (spec.window or np.iinfo(np.int32).max))


class Ops:
    """The ops over one step, in the dtype of the weights bound (`float` family; the others are float32).

    `family_of` gives each weight type its kernel family.
    """

    def __init__(
        self, batch: Batch, memory: Memory, family_of: Callable[[WeightType], Family] = lambda type: "float"
    ) -> None:
        self.batch = batch
        self.memory = memory
        self._family_of = family_of

    def _sequences(self) -> Iterator[tuple[int, slice]]:
        for s, (start, stop) in enumerate(zip(self.batch.seq_starts[:-1], self.batch.seq_starts[1:], strict=True)):
            yield s, slice(int(start), int(stop))

    def embed(self, table: Matrix, ids: I32) -> Array:
        """Rows of the table, as their family holds them."""
        is_rounded = self._family_of(table.weight.type) in ("bf16", "bf16-unordered")
        return (table.operands if is_rounded else table.values)[ids]

    def _product(self, x: Array, matrix: Matrix, part: tuple[int, ...] = ()) -> Array:
        """x @ w.T; `part` picks a matrix out of a stack."""
        family = self._family_of(matrix.weight.type)
        if family == "float":
            return x @ matrix.values[part].T
        if family == "bf16-unordered":
            return numerics.bf16_operand(x) @ matrix.operands[part].T
        product = numerics.linear_int8 if family == "int8" else numerics.linear_bf16
        return product(matrix.weight.type, matrix.rows[part], x)

    def linear(self, x: Array, weight: Matrix, bias: Array | None = None) -> Array:
        """x @ weight.T + bias."""
        y = self._product(x, weight)
        return y if bias is None else y + bias

    def expert_linear(self, x: Array, experts: Matrix, ids: I32) -> Array:
        """Each token's chosen experts, one after the other."""
        num_ranks, K = ids.shape[1], experts.shape[2]
        shared = x.shape[1] == K
        y = np.empty((x.shape[0], num_ranks, experts.shape[1]), x.dtype)
        for t, chosen in enumerate(ids):
            for rank, expert in enumerate(chosen):
                own = x[t] if shared else x[t, rank * K : (rank + 1) * K]
                y[t, rank] = self._product(own[None], experts, (int(expert),))[0]
        return y.reshape(x.shape[0], -1)

    def head_linear(self, x: Array, weights: Matrix) -> Array:
        """Each head its own linear map."""
        inputs = np.split(x, weights.shape[0], axis=1)
        return np.concatenate([self._product(head, weights, (h,)) for h, head in enumerate(inputs)], axis=1)

    def route(
        self, scores: Array, *, num_chosen: int, normalize: bool, scoring: Literal["softmax", "sigmoid"]
    ) -> tuple[I32, Array]:
        """The best experts by score; a stable sort gives ties to the lowest id."""
        probabilities = softmax(scores) if scoring == "softmax" else _sigmoid(scores)
        ids = np.argsort(-probabilities, axis=1, kind="stable")[:, :num_chosen].astype(np.int32)
        weights = np.take_along_axis(probabilities, ids, axis=1)
        return ids, weights / weights.sum(axis=1, keepdims=True) if normalize else weights

    def combine(self, x: Array, weights: Array) -> Array:
        """The weighted sum over ranks, ascending."""
        parts = x.reshape(x.shape[0], weights.shape[1], -1)
        y = np.zeros_like(parts[:, 0])
        for rank in range(weights.shape[1]):
            y += weights[:, rank, None] * parts[:, rank]
        return y

    def rms_norm(self, x: Array, weight: Array | None, *, eps: float, num_groups: int = 1) -> Array:
        """x / sqrt(mean(x^2) + eps) * weight within each group (head) of a row."""
        parts = x.reshape(x.shape[0], num_groups, -1)
        y = parts / np.sqrt((parts * parts).mean(axis=-1, keepdims=True) + x.dtype.type(eps))
        return (y if weight is None else y * weight).reshape(x.shape)

    def layer_norm(self, x: Array, weight: Array, bias: Array | None, *, eps: float) -> Array:
        """(x - mean) / sqrt(variance + eps) * weight + bias."""
        centred = x - x.mean(axis=-1, keepdims=True)
        y = centred / np.sqrt((centred * centred).mean(axis=-1, keepdims=True) + x.dtype.type(eps)) * weight
        return y if bias is None else y + bias

    def rope(self, x: Array, positions: I32, *, num_heads: int, spec: RopeSpec) -> Array:
        """Rotate the pairs (i, i + dim/2) of each head by position * inv_freq[i]; angles in float64."""
        angle = positions[:, None].astype(np.float64) * np.array(spec.inv_freq)
        cos = (np.cos(angle) * spec.scale).astype(x.dtype)[:, None]
        sin = (np.sin(angle) * spec.scale).astype(x.dtype)[:, None]
        heads = x.reshape(x.shape[0], num_heads, -1)
        a, b, rest = np.split(heads, [spec.dim // 2, spec.dim], axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1).reshape(x.shape)

    def attend(self, q: Array, k: Array | None, v: Array | None, *, spec: AttendSpec) -> Array:
        """Sequence by sequence: store, read back all that a query may see, softmax, weigh."""
        if k is not None and spec.mask == "causal":
            self._remember(k, v, spec)
        out = np.empty((q.shape[0], spec.num_heads * spec.value_dim), q.dtype)
        for s, rows in self._sequences():
            positions = self.batch.positions[rows]
            if k is not None and v is not None and spec.mask == "full":
                key_positions = positions
                keys, values = _heads(k[rows], spec.num_kv_heads), _heads(v[rows], spec.num_kv_heads)
            else:
                key_positions = self._stored_positions(s, positions, spec)
                keys, values = self.memory.read(spec.group, spec.slot, self._table(s, spec.group), key_positions)
            out[rows] = self._attend_one(q[rows], keys, values, _visible(positions, key_positions, spec), spec)
        return out

    def remember(self, k: Array, v: Array, *, spec: AttendSpec) -> None:
        """Round and store the keys and values of every sequence."""
        self._remember(k, v, spec)

    def _remember(self, k: Array, v: Array | None, spec: AttendSpec) -> None:
        for s, rows in self._sequences():
            keys = _heads(k[rows], spec.num_kv_heads)
            values = None if v is None else _heads(v[rows], spec.num_kv_heads)
            table = self._table(s, spec.group)
            self.memory.store(spec.group, spec.slot, table, self.batch.positions[rows], keys, values)

    def _table(self, s: int, group: int) -> I32:
        return self.batch.tables[group][s]

    def _stored_positions(self, s: int, positions: I32, spec: AttendSpec) -> I32:
        """Positions of all keys that any of one sequence's queries may see; earlier blocks may be given back."""
        if spec.mask == "cross":
            assert self.batch.cross_lengths is not None
            return np.arange(self.batch.cross_lengths[s], dtype=np.int32)
        first = 0 if spec.window is None else max(0, int(positions[0]) - spec.window + 1)
        return np.arange(first, positions[-1] + 1, dtype=np.int32)

    def _attend_one(self, q: Array, k: Array, v: Array, visible: Array, spec: AttendSpec) -> Array:
        """[n, H*d], [L, G, d], [L, G, dv], [n, L] -> [n, H*dv]; query head h reads key head h // (H/G)."""
        per_group = spec.num_heads // spec.num_kv_heads
        queries = q.reshape(q.shape[0], spec.num_kv_heads, per_group, spec.head_dim)
        scores = np.einsum("ngjd,lgd->gjnl", queries, k, optimize=True) * q.dtype.type(spec.scale)
        if spec.softcap is not None:
            scores = self.softcap(scores, spec.softcap)
        weights = softmax(np.where(visible, scores, -np.inf))
        return np.einsum("gjnl,lgd->ngjd", weights, v, optimize=True).reshape(q.shape[0], -1)

    def recur(self, x: Array, params: dict[str, Array], *, rule: Rule, layer: int, group: int, slot: int) -> Array:
        """Token by token, from the sequence's state or from zeros at position 0."""
        out = np.empty_like(x)
        for s, rows in self._sequences():
            shape = recurrence.state_shape(rule, params, x.shape[1])
            state = self.memory.state(group, slot, self._table(s, group), shape)
            if self.batch.positions[rows.start] == 0:
                state[:] = 0
            out[rows] = recurrence.RULES[rule](x[rows], recurrence.rows_of(rule, params, rows), state)
        return out

    def add(self, x: Array, y: Array) -> Array:
        """x + y."""
        return x + y

    def mul(self, x: Array, y: Array) -> Array:
        """x * y."""
        return x * y

    def scale(self, x: Array, factor: float) -> Array:
        """x * factor, the factor rounded to float32."""
        return x * x.dtype.type(np.float32(factor))

    def act(self, x: Array, kind: Activation) -> Array:
        """An activation."""
        return ACTIVATIONS[kind](x)

    def glu(self, gate: Array, up: Array, kind: Activation) -> Array:
        """act(gate) * up."""
        return ACTIVATIONS[kind](gate) * up

    def softcap(self, x: Array, cap: float) -> Array:
        """cap * tanh(x / cap)."""
        return x.dtype.type(cap) * np.tanh(x / x.dtype.type(cap))

    def split(self, x: Array, widths: tuple[int, ...]) -> tuple[Array, ...]:
        """Runs of columns."""
        assert sum(widths) == x.shape[1]
        return tuple(np.split(x, np.cumsum(widths)[:-1], axis=1))

    def concat(self, parts: tuple[Array, ...], *, groups: int = 1) -> Array:
        """Side by side, within each group of columns."""
        num_rows = parts[0].shape[0]
        grouped = [part.reshape(num_rows, groups, -1) for part in parts]
        return np.concatenate(grouped, axis=-1).reshape(num_rows, -1)

    def regroup(self, x: Array, *, groups: int, take: tuple[int, int]) -> Array:
        """The same run of columns out of every group."""
        return x.reshape(x.shape[0], groups, -1)[:, :, take[0] : take[1]].reshape(x.shape[0], -1)

    def repeat(self, x: Array, times: int) -> Array:
        """The row again and again."""
        return np.tile(x, (1, times))

    def take(self, x: Array, rows: I32) -> Array:
        """Some rows."""
        return x[rows]

    def logits(
        self, x: Array, weight: Matrix, *, num_valid: int, bias: Array | None = None, softcap: float | None = None
    ) -> Array:
        """The head, without its padding rows."""
        y = self.linear(x, weight, bias)[:, :num_valid]
        return y if softcap is None else self.softcap(y, softcap)
