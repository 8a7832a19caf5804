"""Gemma 3 (text): norms on both sides of each part, q/k norms, embeddings scaled by sqrt(D), and five layers with a
sliding window (and an unscaled rope of base 10000) for each one without. The +1 of its norms is in the files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from pelton.models.base import MAX_CONTEXT, Family, ModelConfig, read_config
from pelton.models.layers import (
    attention,
    expect_attention,
    expect_ends,
    expect_mlp,
    expect_vectors,
    final,
    gated_mlp,
    within,
)
from pelton.models.metadata import Metadata
from pelton.models.weights import Expected
from pelton.ops.spec import BatchRefs, Ops

V = TypeVar("V")

_LAYERS_OF_27B = 62


def _windows(meta: Metadata, num_layers: int) -> Sequence[int | None]:
    """Every sixth layer is global unless the file names another period, or each layer's kind."""
    window = meta.integer("attention.sliding_window", high=MAX_CONTEXT)
    is_local = meta.flags("attention.sliding_window_pattern", num_layers)
    if is_local is None:
        period = meta.integer("attention.sliding_window_pattern", high=1024, default=6)
        is_local = tuple((i + 1) % period != 0 for i in range(num_layers))
    return [window if local else None for local in is_local]


def configure(meta: Metadata, context: int) -> ModelConfig:
    """Files do not state the query scale: it is that of the head width, but for 27B that of D / H."""
    config = read_config(
        meta,
        context,
        windows=lambda num_layers: _windows(meta, num_layers),
        local_rope_base=meta.number("rope.freq_base_swa", low=2.0, high=1e12, default=10000.0),
        activation="gelu_tanh",
        embed_scale=math.sqrt(meta.integer("embedding_length", high=1 << 17)),
    )
    if len(config.layers) == _LAYERS_OF_27B and not meta.has("attention.scale"):
        return replace(config, attention_scale=1 / math.sqrt(config.width // config.num_heads))
    return config


def expect(cfg: ModelConfig) -> list[Expected]:
    """Four norms per layer, and those of Q and K."""
    expected = expect_ends(cfg)
    for i in range(len(cfg.layers)):
        expected += expect_attention(cfg, i) + expect_mlp(cfg, i)
        expected += expect_vectors(i, cfg.head_dim, ("q_norm", "attn_q_norm"), ("k_norm", "attn_k_norm"))
        expected += expect_vectors(
            i, cfg.width, ("post_attn_norm", "post_attention_norm"), ("post_mlp_norm", "post_ffw_norm")
        )
    return expected


def hidden(ops: Ops[V], weights: Mapping[str, V], batch: BatchRefs, cfg: ModelConfig) -> V:
    """ids -> [R, D] final hidden states."""
    x = ops.scale(ops.embed(weights["embed"], batch.ids), cfg.embed_scale)
    for i in range(len(cfg.layers)):
        w = within(weights, i)
        h = attention(ops, w, ops.rms_norm(x, w["attn_norm"], eps=cfg.norm_eps), batch, cfg, i)
        x = ops.add(x, ops.rms_norm(h, w["post_attn_norm"], eps=cfg.norm_eps))
        h = gated_mlp(ops, w, ops.rms_norm(x, w["mlp_norm"], eps=cfg.norm_eps), cfg)
        x = ops.add(x, ops.rms_norm(h, w["post_mlp_norm"], eps=cfg.norm_eps))
    return final(ops, weights, x, batch, cfg)


FAMILY = Family(configure, expect, hidden)
