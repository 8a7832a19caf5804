"""Tiny random models of every family, with sizes that catch what round numbers hide."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers import models as hf

VOCAB = 131
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
}


def _rope(rope_type: str, theta: float = 10000.0, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": theta, **more}}


LLAMA3 = _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=64)
EIGHT = range(8)  # half of a head of 16
LONGROPE = _rope(
    "longrope",
    original_max_position_embeddings=64,
    long_factor=[1.5 + 0.5 * i for i in EIGHT],
    short_factor=[1.0 + 0.1 * i for i in EIGHT],
)
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 64}

CASES: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (hf.llama.LlamaConfig, {}),
    "llama-tied-llama3": (hf.llama.LlamaConfig, LLAMA3 | {"tie_word_embeddings": True}),
    "llama-linear": (hf.llama.LlamaConfig, _rope("linear", factor=3.0)),
    "llama-yarn": (hf.llama.LlamaConfig, YARN),
    "llama-yarn-attention-factor": (
        hf.llama.LlamaConfig,
        _rope("yarn", factor=4.0, original_max_position_embeddings=64, attention_factor=0.8, beta_fast=16, beta_slow=2),
    ),
    "llama-longrope": (hf.llama.LlamaConfig, LONGROPE),
    "llama-biases": (hf.llama.LlamaConfig, {"attention_bias": True, "head_dim": 32}),
    "mistral-window": (hf.mistral.MistralConfig, {"head_dim": 32, "sliding_window": 24}),
    "mixtral": (hf.mixtral.MixtralConfig, {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2": (hf.qwen2.Qwen2Config, {"tie_word_embeddings": True, **_rope("default", 1e6)}),
    "qwen2-yarn": (hf.qwen2.Qwen2Config, YARN),
    "qwen3": (hf.qwen3.Qwen3Config, {"head_dim": 32}),
    "qwen2moe": (hf.qwen2_moe.Qwen2MoeConfig, EXPERTS | {"shared_expert_intermediate_size": 96}),
    "qwen3moe": (hf.qwen3_moe.Qwen3MoeConfig, EXPERTS | {"head_dim": 16, "norm_topk_prob": True}),
    "gemma3": (
        hf.gemma3.Gemma3TextConfig,
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
}


def build(case: str, **changes: Any) -> torch.nn.Module:
    """The case's model with random weights large enough that every part matters; the same at every call."""
    config_type, own = CASES[case]
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config_type(**(BASE | own | changes)), attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                centre = 0.0 if "gemma" in model.config.model_type else 1.0
                parameter.normal_(centre, 0.3)
            elif parameter.ndim == 1:
                parameter.normal_(0, 0.5)
            elif "embed_tokens" in name:
                parameter.normal_(0, 1)
            else:
                parameter.normal_(0, 1.2 / math.sqrt(parameter.shape[-1]))
    return model.eval().float()


def logits(model: torch.nn.Module, ids: list[int], at_least: int = 0) -> Any:
    """[len(ids), vocab] of one sequence, computed whole, without a cache. Tokens after its end, up to `at_least`,
    change nothing but which table longrope takes."""
    padded = ids + [0] * (at_least - len(ids))
    with torch.no_grad():
        return model(torch.tensor([padded]), use_cache=False).logits[0, : len(ids)].numpy()
