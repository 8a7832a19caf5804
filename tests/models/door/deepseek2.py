"""DeepSeek-V2: latent attention (MLA), experts beside always-used shared ones.

The cache holds one latent [rank] and one rotated key [rope] per token, shared by all heads: the map from the latent
to a head's keys is applied to its query instead, and the map to its values to its output.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from pelton.models.layers import within
from pelton.models.rope import base_frequencies
from pelton.models.weights import unpermute
from pelton.ops.data import CacheGroup, Weight
from pelton.ops.spec import AttendSpec, BatchRefs, Ops, RopeSpec
from tests.models.door.weights import state, weight

V = TypeVar("V")


def groups(c: Any) -> tuple[CacheGroup, ...]:
    return (CacheGroup("latent", c.num_hidden_layers, 1, c.kv_lora_rank + c.qk_rope_head_dim, c.kv_lora_rank),)


def _attention(ops: Ops[V], w: Mapping[str, V], h: V, batch: BatchRefs, c: Any, i: int) -> V:
    heads, nope, pe, rank = c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim, c.kv_lora_rank
    rope = RopeSpec(pe, tuple(base_frequencies(c.rope_parameters["rope_theta"], pe).tolist()))
    spec = AttendSpec(i, 0, i, heads, 1, rank + pe, rank, 1 / math.sqrt(nope + pe))
    q = ops.linear(ops.rms_norm(ops.linear(h, w["q_down"]), w["q_norm"], eps=c.rms_norm_eps), w["q_up"])
    q_latent = ops.head_linear(ops.regroup(q, groups=heads, take=(0, nope)), w["k_up"])
    q_rotated = ops.regroup(q, groups=heads, take=(nope, nope + pe))
    q_rotated = ops.rope(q_rotated, batch.positions, num_heads=heads, spec=rope)
    latent, k_rotated = ops.split(ops.linear(h, w["kv_down"]), (rank, pe))
    latent = ops.rms_norm(latent, w["kv_norm"], eps=c.rms_norm_eps)
    k_rotated = ops.rope(k_rotated, batch.positions, num_heads=1, spec=rope)
    queries = ops.concat((q_latent, q_rotated), groups=heads)
    y = ops.attend(queries, ops.concat((latent, k_rotated)), None, spec=spec)
    return ops.linear(ops.head_linear(y, w["v_up"]), w["o"])


def _mlp(ops: Ops[V], w: Mapping[str, V], h: V, prefix: str = "") -> V:
    gate, up = ops.linear(h, w[f"{prefix}gate"]), ops.linear(h, w[f"{prefix}up"])
    return ops.linear(ops.glu(gate, up, "silu"), w[f"{prefix}down"])


def _moe(ops: Ops[V], w: Mapping[str, V], h: V, c: Any) -> V:
    scores = ops.linear(h, w["router"])
    ids, shares = ops.route(scores, num_chosen=c.num_experts_per_tok, normalize=False, scoring="softmax")
    gate, up = ops.expert_linear(h, w["gate_experts"], ids), ops.expert_linear(h, w["up_experts"], ids)
    y = ops.expert_linear(ops.glu(gate, up, "silu"), w["down_experts"], ids)
    return ops.add(ops.combine(y, ops.scale(shares, c.routed_scaling_factor)), _mlp(ops, w, h, "shared_"))


def step(ops: Ops[V], weights: Mapping[str, V], batch: BatchRefs, c: Any) -> V:
    x = ops.embed(weights["embed"], batch.ids)
    for i in range(c.num_hidden_layers):
        w = within(weights, i)
        x = ops.add(x, _attention(ops, w, ops.rms_norm(x, w["attn_norm"], eps=c.rms_norm_eps), batch, c, i))
        h = ops.rms_norm(x, w["mlp_norm"], eps=c.rms_norm_eps)
        x = ops.add(x, _moe(ops, w, h, c) if "router" in w else _mlp(ops, w, h))
    h = ops.rms_norm(ops.take(x, batch.logit_rows), weights["norm"], eps=c.rms_norm_eps)
    return ops.logits(h, weights["head"], num_valid=c.vocab_size)


_PLAIN = {
    "input_layernorm.weight": "attn_norm",
    "post_attention_layernorm.weight": "mlp_norm",
    "self_attn.q_a_proj.weight": "q_down",
    "self_attn.q_a_layernorm.weight": "q_norm",
    "self_attn.kv_a_layernorm.weight": "kv_norm",
    "self_attn.o_proj.weight": "o",
    "mlp.gate_proj.weight": "gate",
    "mlp.up_proj.weight": "up",
    "mlp.down_proj.weight": "down",
    "mlp.gate.weight": "router",
    "mlp.experts.down_proj": "down_experts",
    "mlp.shared_experts.gate_proj.weight": "shared_gate",
    "mlp.shared_experts.up_proj.weight": "shared_up",
    "mlp.shared_experts.down_proj.weight": "shared_down",
}


def _layer(hf: dict[str, np.ndarray], c: Any, i: int) -> dict[str, tuple[np.ndarray, Any]]:
    """Its rope pairs neighbours; rows of Q and K are put into halves."""
    heads, nope, pe, rank = c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim, c.kv_lora_rank
    own = {_PLAIN[name]: (values, None) for name, values in hf.items() if name in _PLAIN}
    head_rows = np.concatenate([np.arange(nope), nope + unpermute(pe, 1)])
    q_order = (np.arange(heads)[:, None] * (nope + pe) + head_rows).reshape(-1).astype(np.int32)
    own["q_up"] = (hf["self_attn.q_b_proj.weight"], q_order)
    kv_order = np.concatenate([np.arange(rank), rank + unpermute(pe, 1)]).astype(np.int32)
    own["kv_down"] = (hf["self_attn.kv_a_proj_with_mqa.weight"], kv_order)
    k_up, v_up = np.split(hf["self_attn.kv_b_proj.weight"].reshape(heads, -1, rank), [nope], axis=1)
    own |= {"k_up": (k_up.swapaxes(1, 2), None), "v_up": (v_up, None)}
    if "mlp.experts.gate_up_proj" in hf:
        gate, up = np.split(hf["mlp.experts.gate_up_proj"], 2, axis=1)
        own |= {"gate_experts": (gate, None), "up_experts": (up, None)}
    return {f"layers.{i}.{name}": value for name, value in own.items()}


def weights(model: Any) -> dict[str, Weight]:
    hf = state(model)
    named: dict[str, tuple[np.ndarray, Any]] = {
        "embed": (hf["embed_tokens.weight"], None),
        "norm": (hf["norm.weight"], None),
        "head": (hf["lm_head.weight"], None),
    }
    for i in range(model.config.num_hidden_layers):
        named |= _layer(within(hf, i), model.config, i)
    return {name: weight(name, values, order) for name, (values, order) in named.items()}
