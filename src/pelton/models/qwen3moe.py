"""Qwen 3 MoE: Qwen 3 with experts, none shared."""

from __future__ import annotations

from pelton.models.base import Experts, Family, ModelConfig, read_config
from pelton.models.layers import decoder
from pelton.models.metadata import Metadata
from pelton.models.qwen3 import expect


def configure(meta: Metadata, context: int) -> ModelConfig:
    """Routing weights are normalised unless the file says otherwise."""
    count = meta.integer("expert_count", high=1024)
    experts = Experts(
        count,
        meta.integer("expert_used_count", high=count),
        width=meta.integer("expert_feed_forward_length", high=1 << 20),
        normalize=meta.flag("expert_weights_norm", default=True),
    )
    return read_config(meta, context, experts=experts)


FAMILY = Family(configure, expect, decoder)
