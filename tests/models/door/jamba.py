"""Jamba: Mamba layers with an attention layer between them, experts in some layers; no rope at all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from pelton.models.layers import within
from pelton.ops.data import CacheGroup, Weight
from pelton.ops.spec import AttendSpec, BatchRefs, Ops
from tests.models.door.weights import state, weight

V = TypeVar("V")


def _kinds(c: Any) -> list[str]:
    return [
        "attention" if i % c.attn_layer_period == c.attn_layer_offset else "mamba" for i in range(c.num_hidden_layers)
    ]


def groups(c: Any) -> tuple[CacheGroup, ...]:
    """Keys; the convolutions' last inputs; the scans' states."""
    inner, num_mamba = c.mamba_expand * c.hidden_size, _kinds(c).count("mamba")
    head_dim = c.hidden_size // c.num_attention_heads
    return (
        CacheGroup("full", c.num_hidden_layers - num_mamba, c.num_key_value_heads, head_dim, head_dim),
        CacheGroup("state", num_mamba, 1, (c.mamba_d_conv - 1) * inner, 0),
        CacheGroup("state", num_mamba, 1, inner * c.mamba_d_state, 0),
    )


def _mamba(ops: Ops[V], w: Mapping[str, V], h: V, c: Any, i: int, slot: int) -> V:
    inner, rank, n, eps = c.mamba_expand * c.hidden_size, c.mamba_dt_rank, c.mamba_d_state, c.rms_norm_eps
    x, z = ops.split(ops.linear(h, w["in"]), (inner, inner))
    x = ops.recur(x, {"weight": w["conv"], "bias": w["conv_bias"]}, rule="conv", layer=i, group=1, slot=slot)
    x = ops.act(x, "silu")
    dt, B, C = ops.split(ops.linear(x, w["x"]), (rank, n, n))
    dt = ops.act(ops.linear(ops.rms_norm(dt, w["dt_norm"], eps=eps), w["dt"], w["dt_bias"]), "softplus")
    params = {
        "a": w["a"],
        "d": w["d"],
        "dt": dt,
        "B": ops.rms_norm(B, w["b_norm"], eps=eps),
        "C": ops.rms_norm(C, w["c_norm"], eps=eps),
    }
    y = ops.recur(x, params, rule="selective_scan", layer=i, group=2, slot=slot)
    return ops.linear(ops.glu(z, y, "silu"), w["out"])


def _attention(ops: Ops[V], w: Mapping[str, V], h: V, c: Any, i: int, slot: int) -> V:
    head_dim = c.hidden_size // c.num_attention_heads
    heads = (c.num_attention_heads, c.num_key_value_heads)
    spec = AttendSpec(i, 0, slot, *heads, head_dim, head_dim, 1 / math.sqrt(head_dim))
    q, k, v = (ops.linear(h, w[name]) for name in ("q", "k", "v"))
    return ops.linear(ops.attend(q, k, v, spec=spec), w["o"])


def _feed_forward(ops: Ops[V], w: Mapping[str, V], h: V, c: Any) -> V:
    if "router" not in w:
        return ops.linear(ops.glu(ops.linear(h, w["gate"]), ops.linear(h, w["up"]), "silu"), w["down"])
    scores = ops.linear(h, w["router"])
    ids, shares = ops.route(scores, num_chosen=c.num_experts_per_tok, normalize=False, scoring="softmax")
    gate, up = ops.expert_linear(h, w["gate_experts"], ids), ops.expert_linear(h, w["up_experts"], ids)
    return ops.combine(ops.expert_linear(ops.glu(gate, up, "silu"), w["down_experts"], ids), shares)


def step(ops: Ops[V], weights: Mapping[str, V], batch: BatchRefs, c: Any) -> V:
    kinds = _kinds(c)
    x = ops.embed(weights["embed"], batch.ids)
    for i, kind in enumerate(kinds):
        w, slot = within(weights, i), kinds[:i].count(kind)
        mix = _mamba if kind == "mamba" else _attention
        x = ops.add(x, mix(ops, w, ops.rms_norm(x, w["mix_norm"], eps=c.rms_norm_eps), c, i, slot))
        x = ops.add(x, _feed_forward(ops, w, ops.rms_norm(x, w["ff_norm"], eps=c.rms_norm_eps), c))
    h = ops.rms_norm(ops.take(x, batch.logit_rows), weights["norm"], eps=c.rms_norm_eps)
    return ops.logits(h, weights["head"], num_valid=c.vocab_size)


_NAMES = {
    "input_layernorm.weight": "mix_norm",
    "pre_ff_layernorm.weight": "ff_norm",
    "self_attn.q_proj.weight": "q",
    "self_attn.k_proj.weight": "k",
    "self_attn.v_proj.weight": "v",
    "self_attn.o_proj.weight": "o",
    "mamba.in_proj.weight": "in",
    "mamba.conv1d.bias": "conv_bias",
    "mamba.x_proj.weight": "x",
    "mamba.dt_proj.weight": "dt",
    "mamba.dt_proj.bias": "dt_bias",
    "mamba.dt_layernorm.weight": "dt_norm",
    "mamba.b_layernorm.weight": "b_norm",
    "mamba.c_layernorm.weight": "c_norm",
    "mamba.D": "d",
    "mamba.out_proj.weight": "out",
    "feed_forward.gate_proj.weight": "gate",
    "feed_forward.up_proj.weight": "up",
    "feed_forward.down_proj.weight": "down",
    "feed_forward.router.weight": "router",
    "feed_forward.experts.down_proj": "down_experts",
}


def _layer(hf: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    own = {_NAMES[name]: values for name, values in hf.items() if name in _NAMES}
    if "mamba.A_log" in hf:
        own |= {"a": -np.exp(hf["mamba.A_log"]), "conv": hf["mamba.conv1d.weight"][:, 0]}
    if "feed_forward.experts.gate_up_proj" in hf:
        own["gate_experts"], own["up_experts"] = np.split(hf["feed_forward.experts.gate_up_proj"], 2, axis=1)
    return own


def weights(model: Any) -> dict[str, Weight]:
    hf = state(model)
    named = {"embed": hf["embed_tokens.weight"], "norm": hf["final_layernorm.weight"], "head": hf["lm_head.weight"]}
    for i in range(model.config.num_hidden_layers):
        named |= {f"layers.{i}.{name}": values for name, values in _layer(within(hf, i)).items()}
    return {name: weight(name, values) for name, values in named.items()}
