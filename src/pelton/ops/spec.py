"""The vocabulary that models are written in: every op's meaning and shape rule.

A model is a plain function over an `Ops`. `reference.Ops` computes eagerly in NumPy, `backends.cpu.plan.Recorder`
writes the calls down as a plan. Operands are values of the implementation's own type `V` (an array, a
`TensorRef`); weights are given by name through `weights[...]`, which yields such values too.

Shapes: `T` tokens of the step (a run-time variable, never a captured size), `R` rows that need logits, `D` model
width, `H`/`G` query and key/value heads, `d` head width. Activations are 2-D [T, width], rows are tokens; heads lie
side by side in a row. All activations are float32 between ops.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

T = "T"
"""The symbolic number of tokens in a step."""
R = "R"
"""The symbolic number of rows of a step that need logits."""

Dim = int | str
Activation = Literal["silu", "gelu_tanh", "gelu", "relu", "sigmoid", "softplus"]
Mask = Literal["causal", "full", "cross"]
Rule = Literal["conv", "selective_scan"]


@dataclass(frozen=True)
class TensorRef:
    """A tensor by name and shape, never its data."""

    name: str
    shape: tuple[Dim, ...]


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding over the first `dim` values of each head, rotating (i, i + dim/2) pairs.

    `inv_freq` holds the dim/2 angular frequencies per position, every scaling (linear, llama3, yarn, longrope)
    already applied: float64 values, as plain floats so that the spec can be compared and dumped. `scale`
    multiplies cos and sin (yarn's attention factor).
    """

    dim: int
    inv_freq: tuple[float, ...]
    scale: float = 1.0


@dataclass(frozen=True)
class AttendSpec:
    """How one layer attends. Scores are `scale * q.k`, then `softcap * tanh(scores / softcap)` where a cap is set.

    `window` counts the current token: with window w, position p sees keys p-w+1 .. p. `group` is the index of the
    layer's cache group, `slot` the layer's index within that group's memory. Key and value widths may differ (MLA).
    """

    layer: int
    group: int
    slot: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    mask: Mask = "causal"
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True)
class BatchRefs:
    """The inputs of a step, by name. `positions` is [T]; the cache is reached through `attend` alone."""

    ids: Any
    positions: Any
    logit_rows: Any


V = TypeVar("V")


class Ops(Protocol[V]):
    """The ops. Every method is pure but `attend`, `remember` and `recur`, which write the sequence's cache."""

    def embed(self, table: V, ids: V) -> V:
        """[N, D], [T] -> [T, D]: rows of the table. Exact for f32; dequantised values for quantised tables."""
        ...

    def linear(self, x: V, weight: V, bias: V | None = None) -> V:
        """[T, K], [N, K] -> [T, N]: x @ weight.T + bias, in the numerics of the weight's kernel family."""
        ...

    def expert_linear(self, x: V, experts: V, ids: V) -> V:
        """[T, K] or [T, E*K], [num_experts, N, K], [T, E] -> [T, E*N]: for each of a token's E chosen experts its
        own linear map, results side by side in rank order. x of width E*K gives each rank its own input."""
        ...

    def head_linear(self, x: V, weights: V) -> V:
        """[T, H*K], [H, N, K] -> [T, H*N]: each head its own linear map (MLA folds its K and V maps this way)."""
        ...

    def route(
        self, scores: V, *, num_chosen: int, normalize: bool, scoring: Literal["softmax", "sigmoid"]
    ) -> tuple[V, V]:
        """[T, num_experts] -> ids [T, E], weights [T, E]: the E best, descending, ties to the lowest id."""
        ...

    def combine(self, x: V, weights: V) -> V:
        """[T, E*D], [T, E] -> [T, D]: sum over ranks, ascending, of weight * value."""
        ...

    def rms_norm(self, x: V, weight: V | None, *, eps: float, num_groups: int = 1) -> V:
        """[T, g*D], [D] -> same: x / sqrt(mean(x^2) + eps) * weight, over each of the g groups of a row."""
        ...

    def layer_norm(self, x: V, weight: V, bias: V | None, *, eps: float) -> V:
        """[T, D] -> same: (x - mean) / sqrt(variance + eps) * weight + bias."""
        ...

    def rope(self, x: V, positions: V, *, num_heads: int, spec: RopeSpec) -> V:
        """[T, num_heads*d], [T] -> same: rotate each head by its position."""
        ...

    def attend(self, q: V, k: V | None, v: V | None, *, spec: AttendSpec) -> V:
        """[T, H*d], [T, G*d], [T, G*dv] -> [T, H*dv]: round k and v to the cache type and store them, then attend
        over all keys of the token's own sequence as stored, those of this step included.

        In a latent cache group v is None: values are the first value_dim columns of the keys.
        Mask "full" has no cache: each token sees all tokens of its sequence, which stands whole in the step.
        Mask "cross" takes no k and v: it reads what `remember` stored."""
        ...

    def remember(self, k: V, v: V, *, spec: AttendSpec) -> None:
        """[T, G*d], [T, G*dv]: store an encoder's k and v, rounded, for that layer's "cross" attention later."""
        ...

    def recur(self, x: V, params: dict[str, V], *, rule: Rule, layer: int, group: int, slot: int) -> V:
        """[T, W] -> [T, W]: one recurrence over each sequence's tokens in order, its state kept in the sequence's
        one block of a `state` cache group (zeros before position 0). Rules and their params:

        - "conv": y_t = sum_j weight[:, j] * x_{t-L+1+j} + bias; weight [W, L], bias [W] optional; state [L-1, W].
        - "selective_scan" (Mamba, arXiv 2312.00752): h_t = exp(dt a) h_{t-1} + dt x_t B_t; y_t = h_t C_t + d x_t;
          a [W, N], d [W], and per token dt [T, W], B [T, N], C [T, N]; state [W, N].
        """
        ...

    def add(self, x: V, y: V) -> V:
        """[T, D] + [T, D], or + [D] broadcast over rows."""
        ...

    def mul(self, x: V, y: V) -> V:
        """[T, D] * [T, D], or * [D] or [T, 1] broadcast."""
        ...

    def scale(self, x: V, factor: float) -> V:
        """x * factor, factor rounded to float32."""
        ...

    def act(self, x: V, kind: Activation) -> V:
        """An activation, element by element."""
        ...

    def glu(self, gate: V, up: V, kind: Activation) -> V:
        """act(gate) * up."""
        ...

    def softcap(self, x: V, cap: float) -> V:
        """cap * tanh(x / cap)."""
        ...

    def split(self, x: V, widths: tuple[int, ...]) -> tuple[V, ...]:
        """Cut the columns of each row into runs of these widths."""
        ...

    def concat(self, parts: tuple[V, ...], *, groups: int = 1) -> V:
        """Put rows side by side; with groups (heads), side by side within each group of columns."""
        ...

    def regroup(self, x: V, *, groups: int, take: tuple[int, int]) -> V:
        """[T, groups*w] -> [T, groups*(take[1]-take[0])]: the same run of columns out of every group."""
        ...

    def repeat(self, x: V, times: int) -> V:
        """[T, D] -> [T, times*D]: the row again and again."""
        ...

    def take(self, x: V, rows: V) -> V:
        """[T, D], [R] -> [R, D]: some rows."""
        ...

    def logits(self, x: V, weight: V, *, num_valid: int, bias: V | None = None, softcap: float | None = None) -> V:
        """[R, D], [N, D] -> [R, num_valid]: the head. A backend may put it off until sampling asks for it and
        never hold it whole; rows of the weight from `num_valid` on are padding and can never be sampled."""
        ...


def rows_of(ref: TensorRef) -> Dim:
    """The (symbolic) number of rows of an activation."""
    return ref.shape[0]
