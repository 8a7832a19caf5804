"""Qwen 3: llama with a norm over each head of Q and K; rows are not permuted in its files."""

from __future__ import annotations

from pelton.models.base import Family, ModelConfig, read_config
from pelton.models.layers import decoder, expect_attention, expect_ends, expect_mlp, expect_vectors
from pelton.models.weights import Expected


def expect(cfg: ModelConfig) -> list[Expected]:
    """Norms of Q and K."""
    expected = expect_ends(cfg)
    for i in range(len(cfg.layers)):
        expected += expect_attention(cfg, i) + expect_mlp(cfg, i)
        expected += expect_vectors(i, cfg.head_dim, ("q_norm", "attn_q_norm"), ("k_norm", "attn_k_norm"))
    return expected


FAMILY = Family(read_config, expect, decoder)
