"""Qwen 2 and 2.5: llama with biases on Q, K and V; rows are not permuted in its files."""

from __future__ import annotations

from pelton.models.base import Family, ModelConfig, read_config
from pelton.models.layers import decoder, expect_attention, expect_ends, expect_mlp
from pelton.models.weights import Expected


def expect(cfg: ModelConfig) -> list[Expected]:
    """Biases on Q, K and V."""
    expected = expect_ends(cfg)
    for i in range(len(cfg.layers)):
        expected += expect_attention(cfg, i, biases=True) + expect_mlp(cfg, i)
    return expected


FAMILY = Family(read_config, expect, decoder)
