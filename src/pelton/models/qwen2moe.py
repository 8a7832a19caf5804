"""Qwen 1.5 and 2 MoE: Qwen 2 with experts, one of them shared by all tokens behind a gate of its own."""

from __future__ import annotations

from pelton.models.base import Experts, Family, ModelConfig, read_config
from pelton.models.layers import decoder
from pelton.models.metadata import Metadata
from pelton.models.qwen2 import expect


def configure(meta: Metadata, context: int) -> ModelConfig:
    """Routing weights are not normalised unless the file says so."""
    count = meta.integer("expert_count", high=1024)
    experts = Experts(
        count,
        meta.integer("expert_used_count", high=count),
        width=meta.integer("expert_feed_forward_length", high=1 << 20),
        normalize=meta.flag("expert_weights_norm", default=False),
        shared_width=meta.integer("expert_shared_feed_forward_length", high=1 << 20),
    )
    return read_config(meta, context, experts=experts)


FAMILY = Family(configure, expect, decoder)
