"""Llama 2 and 3, SmolLM2, Mistral, Mixtral: GGUF architecture `llama`.

Its files store the rows of Q and K permuted for a rope over neighbouring pairs; `weights` undoes it.
"""

from __future__ import annotations

from pelton.errors import UnsupportedModel
from pelton.models.base import Experts, Family, ModelConfig, read_config
from pelton.models.layers import decoder, expect_attention, expect_ends, expect_mlp
from pelton.models.metadata import Metadata
from pelton.models.weights import Expected


def configure(meta: Metadata, context: int) -> ModelConfig:
    """Mistral's sliding window and Mixtral's experts are optional."""
    window = meta.integer("attention.sliding_window", low=0, high=1 << 27, default=0) or None
    config = read_config(meta, context, windows=lambda num_layers: [window] * num_layers, experts=_experts(meta))
    if config.layers[0].rope.dim != config.head_dim:
        raise UnsupportedModel(f"{meta.file}: llama models that rotate only a part of each head are not supported")
    return config


def _experts(meta: Metadata) -> Experts | None:
    count = meta.integer("expert_count", low=0, high=1024, default=0)
    if not count:
        return None
    chosen = meta.integer("expert_used_count", high=count)
    return Experts(count, chosen, width=meta.integer("feed_forward_length", high=1 << 20), normalize=True)


def expect(cfg: ModelConfig) -> list[Expected]:
    """Q and K permuted; biases as some relatives have them."""
    expected = expect_ends(cfg)
    for i in range(len(cfg.layers)):
        expected += expect_attention(cfg, i, permuted=True, biases=None) + expect_mlp(cfg, i)
    return expected


FAMILY = Family(configure, expect, decoder)
