"""The parts that decoders are made of, as plain functions over ops, and the tensors that each part needs.

Shapes: x and h are [T, D]. Weights come as one layer's mapping, by the names of `weights`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from pelton.models.base import ModelConfig
from pelton.models.weights import Expected
from pelton.ops.spec import BatchRefs, Ops

V = TypeVar("V")


def within(weights: Mapping[str, V], i: int) -> dict[str, V]:
    """The weights of layer i, by their names within a layer."""
    prefix = f"layers.{i}."
    return {name.removeprefix(prefix): weights[name] for name in weights if name.startswith(prefix)}


def attention(ops: Ops[V], w: Mapping[str, V], h: V, batch: BatchRefs, cfg: ModelConfig, i: int) -> V:
    """[T, D] -> [T, D]: grouped-query attention; biases and q/k norms where the family has them."""
    q = ops.linear(h, w["q"], w.get("q_bias"))
    k = ops.linear(h, w["k"], w.get("k_bias"))
    v = ops.linear(h, w["v"], w.get("v_bias"))
    if "q_norm" in w:
        q = ops.rms_norm(q, w["q_norm"], eps=cfg.norm_eps, num_groups=cfg.num_heads)
        k = ops.rms_norm(k, w["k_norm"], eps=cfg.norm_eps, num_groups=cfg.num_kv_heads)
    rope = cfg.layers[i].rope
    q = ops.rope(q, batch.positions, num_heads=cfg.num_heads, spec=rope)
    k = ops.rope(k, batch.positions, num_heads=cfg.num_kv_heads, spec=rope)
    return ops.linear(ops.attend(q, k, v, spec=cfg.attend_spec(i)), w["o"], w.get("o_bias"))


def gated_mlp(ops: Ops[V], w: Mapping[str, V], h: V, cfg: ModelConfig) -> V:
    """[T, D] -> [T, D]: down(act(gate) * up)."""
    return ops.linear(ops.glu(ops.linear(h, w["gate"]), ops.linear(h, w["up"]), cfg.activation), w["down"])


def moe(ops: Ops[V], w: Mapping[str, V], h: V, cfg: ModelConfig) -> V:
    """[T, D] -> [T, D]: the chosen experts' gated MLPs, weighted; plus a gated shared expert where there is one."""
    assert cfg.experts is not None
    ids, weights = ops.route(
        ops.linear(h, w["router"]),
        num_chosen=cfg.experts.chosen,
        normalize=cfg.experts.normalize,
        scoring="softmax",
    )
    gate = ops.expert_linear(h, w["gate_experts"], ids)
    up = ops.expert_linear(h, w["up_experts"], ids)
    y = ops.combine(ops.expert_linear(ops.glu(gate, up, cfg.activation), w["down_experts"], ids), weights)
    if not cfg.experts.shared_width:
        return y
    shared = {"gate": w["shared_gate"], "up": w["shared_up"], "down": w["shared_down"]}
    share = ops.act(ops.linear(h, w["shared_router"]), "sigmoid")
    return ops.add(y, ops.mul(gated_mlp(ops, shared, h, cfg), share))


def decoder(ops: Ops[V], weights: Mapping[str, V], batch: BatchRefs, cfg: ModelConfig) -> V:
    """The pre-norm decoder that llama and its many relatives are: ids -> [R, D] final hidden states."""
    x = ops.embed(weights["embed"], batch.ids)
    for i in range(len(cfg.layers)):
        w = within(weights, i)
        x = ops.add(x, attention(ops, w, ops.rms_norm(x, w["attn_norm"], eps=cfg.norm_eps), batch, cfg, i))
        h = ops.rms_norm(x, w["mlp_norm"], eps=cfg.norm_eps)
        x = ops.add(x, gated_mlp(ops, w, h, cfg) if cfg.experts is None else moe(ops, w, h, cfg))
    return final(ops, weights, x, batch, cfg)


def final(ops: Ops[V], weights: Mapping[str, V], x: V, batch: BatchRefs, cfg: ModelConfig) -> V:
    """[T, D] -> [R, D]: the final norm, of the rows that are asked for."""
    return ops.rms_norm(ops.take(x, batch.logit_rows), weights["norm"], eps=cfg.norm_eps)


def expect_ends(cfg: ModelConfig) -> list[Expected]:
    """The tensors outside the layers."""
    table = (cfg.num_embeddings, cfg.width)
    ends = [Expected("embed", "token_embd.weight", table), Expected("norm", "output_norm.weight", (cfg.width,))]
    return ends if cfg.head == "embed" else [*ends, Expected("head", "output.weight", table)]


def expect_attention(
    cfg: ModelConfig, i: int, *, permuted: bool = False, biases: bool | None = False
) -> list[Expected]:
    """Tensors of `attention` in layer i. `biases`: True: q, k, v have them; None: as the file has them, o too."""
    q_width, kv_width = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
    projections = (
        ("q", "attn_q", (q_width, cfg.width), cfg.num_heads),
        ("k", "attn_k", (kv_width, cfg.width), cfg.num_kv_heads),
        ("v", "attn_v", (kv_width, cfg.width), 0),
        ("o", "attn_output", (cfg.width, q_width), 0),
    )
    ours, theirs = f"layers.{i}.", f"blk.{i}."
    expected = [Expected(f"{ours}attn_norm", f"{theirs}attn_norm.weight", (cfg.width,))]
    for name, file_name, shape, heads in projections:
        heads = heads if permuted else 0
        expected.append(Expected(ours + name, f"{theirs}{file_name}.weight", shape, permuted_heads=heads))
        if biases is None or (biases and name != "o"):
            bias = Expected(f"{ours}{name}_bias", f"{theirs}{file_name}.bias", shape[:1], biases is None, heads)
            expected.append(bias)
    return expected


def expect_vectors(i: int, width: int, *names: tuple[str, str]) -> list[Expected]:
    """Vectors of layer i, as (our name, the file's)."""
    return [Expected(f"layers.{i}.{ours}", f"blk.{i}.{theirs}.weight", (width,)) for ours, theirs in names]


def expect_mlp(cfg: ModelConfig, i: int) -> list[Expected]:
    """Tensors of `gated_mlp`, or of `moe` where the config has experts."""
    ours, theirs, up, down = f"layers.{i}.", f"blk.{i}.", (cfg.ffn_width, cfg.width), (cfg.width, cfg.ffn_width)
    expected = [Expected(f"{ours}mlp_norm", f"{theirs}ffn_norm.weight", (cfg.width,))]
    if cfg.experts is not None:
        return expected + _expect_experts(cfg, i)
    return [
        *expected,
        Expected(f"{ours}gate", f"{theirs}ffn_gate.weight", up),
        Expected(f"{ours}up", f"{theirs}ffn_up.weight", up),
        Expected(f"{ours}down", f"{theirs}ffn_down.weight", down),
    ]


def _expect_experts(cfg: ModelConfig, i: int) -> list[Expected]:
    assert cfg.experts is not None
    ours, theirs, count, width = f"layers.{i}.", f"blk.{i}.", cfg.experts.count, cfg.experts.width
    expected = [
        Expected(f"{ours}router", f"{theirs}ffn_gate_inp.weight", (count, cfg.width)),
        Expected(f"{ours}gate_experts", f"{theirs}ffn_gate_exps.weight", (count, width, cfg.width)),
        Expected(f"{ours}up_experts", f"{theirs}ffn_up_exps.weight", (count, width, cfg.width)),
        Expected(f"{ours}down_experts", f"{theirs}ffn_down_exps.weight", (count, cfg.width, width)),
    ]
    if shared := cfg.experts.shared_width:
        expected += [
            Expected(f"{ours}shared_gate", f"{theirs}ffn_gate_shexp.weight", (shared, cfg.width)),
            Expected(f"{ours}shared_up", f"{theirs}ffn_up_shexp.weight", (shared, cfg.width)),
            Expected(f"{ours}shared_down", f"{theirs}ffn_down_shexp.weight", (cfg.width, shared)),
            Expected(f"{ours}shared_router", f"{theirs}ffn_gate_inp_shexp.weight", (1, cfg.width)),
        ]
    return expected
