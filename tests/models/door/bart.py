"""BART: an encoder that sees everything at once, and a decoder that also attends to what it left."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from pelton.ops.data import CacheGroup, Weight
from pelton.ops.spec import AttendSpec, BatchRefs, Mask, Ops
from tests.models.door.weights import state, weight

V = TypeVar("V")
EPS = 1e-5
POSITION_OFFSET = 2  # the first rows of BART's position tables are never used


def groups(c: Any) -> tuple[CacheGroup, ...]:
    heads, head_dim = c.decoder_attention_heads, c.d_model // c.decoder_attention_heads
    return (
        CacheGroup("full", c.decoder_layers, heads, head_dim, head_dim),
        CacheGroup("cross", c.decoder_layers, heads, head_dim, head_dim),
    )


def _spec(c: Any, heads: int, i: int, mask: Mask) -> AttendSpec:
    head_dim = c.d_model // heads
    return AttendSpec(i, int(mask == "cross"), i, heads, heads, head_dim, head_dim, 1 / math.sqrt(head_dim), mask)


def _linear(ops: Ops[V], w: Mapping[str, V], name: str, x: V) -> V:
    return ops.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])


def _norm(ops: Ops[V], w: Mapping[str, V], name: str, x: V) -> V:
    return ops.layer_norm(x, w[f"{name}.weight"], w[f"{name}.bias"], eps=EPS)


def _self_attention(ops: Ops[V], w: Mapping[str, V], p: str, x: V, spec: AttendSpec) -> V:
    q, k, v = (_linear(ops, w, f"{p}.self_attn.{name}_proj", x) for name in ("q", "k", "v"))
    y = _linear(ops, w, f"{p}.self_attn.out_proj", ops.attend(q, k, v, spec=spec))
    return _norm(ops, w, f"{p}.self_attn_layer_norm", ops.add(x, y))


def _feed_forward(ops: Ops[V], w: Mapping[str, V], p: str, x: V) -> V:
    y = _linear(ops, w, f"{p}.fc2", ops.act(_linear(ops, w, f"{p}.fc1", x), "gelu"))
    return _norm(ops, w, f"{p}.final_layer_norm", ops.add(x, y))


def _embed(ops: Ops[V], w: Mapping[str, V], side: str, batch: BatchRefs) -> V:
    positions = ops.embed(w[f"{side}.embed_positions.weight"], batch.positions)
    return _norm(ops, w, f"{side}.layernorm_embedding", ops.add(ops.embed(w["shared.weight"], batch.ids), positions))


def encode(ops: Ops[V], w: Mapping[str, V], batch: BatchRefs, c: Any) -> None:
    """Entry point: reads the source and leaves keys and values for every decoder layer."""
    x = _embed(ops, w, "encoder", batch)
    for i in range(c.encoder_layers):
        p = f"encoder.layers.{i}"
        x = _feed_forward(ops, w, p, _self_attention(ops, w, p, x, _spec(c, c.encoder_attention_heads, i, "full")))
    for i in range(c.decoder_layers):
        k, v = (_linear(ops, w, f"decoder.layers.{i}.encoder_attn.{name}_proj", x) for name in ("k", "v"))
        ops.remember(k, v, spec=_spec(c, c.decoder_attention_heads, i, "cross"))


def step(ops: Ops[V], w: Mapping[str, V], batch: BatchRefs, c: Any) -> V:
    """Entry point: the decoder."""
    x = _embed(ops, w, "decoder", batch)
    for i in range(c.decoder_layers):
        p = f"decoder.layers.{i}"
        x = _self_attention(ops, w, p, x, _spec(c, c.decoder_attention_heads, i, "causal"))
        q = _linear(ops, w, f"{p}.encoder_attn.q_proj", x)
        y = ops.attend(q, None, None, spec=_spec(c, c.decoder_attention_heads, i, "cross"))
        x = _norm(ops, w, f"{p}.encoder_attn_layer_norm", ops.add(x, _linear(ops, w, f"{p}.encoder_attn.out_proj", y)))
        x = _feed_forward(ops, w, p, x)
    rows = ops.take(x, batch.logit_rows)
    return ops.logits(rows, w["shared.weight"], num_valid=c.vocab_size, bias=w["final_logits_bias"])


def weights(model: Any) -> dict[str, Weight]:
    """Names are Hugging Face's own."""
    named = {}
    for name, values in state(model).items():
        if name.endswith("embed_positions.weight"):
            order = np.arange(POSITION_OFFSET, len(values), dtype=np.int32)
            named[name] = weight(name, values, order)
        elif name == "final_logits_bias":
            named[name] = weight(name, values[0])
        elif "embed_tokens" not in name and name != "lm_head.weight":
            named[name] = weight(name, values)
    return named
