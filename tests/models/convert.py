"""Hugging Face models as GGUF files, named and laid out as llama.cpp's converter does it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pelton.formats import gguf
from pelton.formats.quants import WeightType
from pelton.formats.tensor import Tensor

ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
GEMMA_LAYER = LAYER | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
}


def permute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows (i, i + d/2) of each head become neighbours."""
    return weight.reshape(num_heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def arrays(model: torch.nn.Module) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor by its GGUF name."""
    config = model.config
    layer = GEMMA_LAYER if config.model_type == "gemma3_text" else LAYER
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        values = tensor.detach().numpy().astype(np.float32)
        stem, _, kind = name.rpartition(".")
        if config.model_type == "gemma3_text" and stem.endswith("norm"):
            values = values + 1
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if stem in ENDS:
            yield f"{ENDS[stem]}.{kind}", values
            continue
        _, _, number, within = name.split(".", 3)
        if within == "mlp.experts.gate_up_proj":
            for part, stacked in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
                yield f"blk.{number}.ffn_{part}_exps.weight", stacked
        elif within == "mlp.experts.down_proj":
            yield f"blk.{number}.ffn_down_exps.weight", values
        else:
            theirs = layer[within.rpartition(".")[0]]
            if ARCHITECTURES[config.model_type] == "llama" and theirs in heads:
                values = permute(values, heads[theirs])
            yield f"blk.{number}.{theirs}.{kind}", values


def rope_metadata(config: Any, arch: str) -> dict[str, Any]:
    """Base and scaling. Llama 3's scaling becomes a tensor, as do longrope's factors (`rope_tensors`)."""
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    keys: dict[str, Any] = {"freq_base": float(rope["rope_theta"])}
    kind = rope["rope_type"]
    if kind in ("linear", "yarn", "longrope"):
        keys["scaling.type"] = kind
        if "factor" in rope:
            keys["scaling.factor"] = float(rope["factor"])
    if "original_max_position_embeddings" in rope and kind != "llama3":
        keys["scaling.original_context_length"] = int(rope["original_max_position_embeddings"])
    for theirs, ours in (
        ("attention_factor", "scaling.yarn_attn_factor" if kind == "yarn" else "scaling.attn_factor"),
        ("beta_fast", "scaling.yarn_beta_fast"),
        ("beta_slow", "scaling.yarn_beta_slow"),
    ):
        if rope.get(theirs) is not None:
            keys[ours] = float(rope[theirs])
    return {f"{arch}.rope.{key}": value for key, value in keys.items()}


def rope_tensors(model: torch.nn.Module) -> Iterator[tuple[str, np.ndarray]]:
    config = model.config
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    if rope["rope_type"] == "llama3":
        dim = head_dim(config)
        plain = rope["rope_theta"] ** -(np.arange(0, dim, 2) / dim)
        yield "rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    if rope["rope_type"] == "longrope":
        yield "rope_factors_long.weight", np.array(rope["long_factor"], np.float32)
        yield "rope_factors_short.weight", np.array(rope["short_factor"], np.float32)


def metadata(model: torch.nn.Module) -> dict[str, Any]:
    config = model.config
    arch = ARCHITECTURES[config.model_type]
    keys: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim(config),
        "attention.value_length": head_dim(config),
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "vocab_size": config.vocab_size,
    }
    if getattr(config, "sliding_window", None) and config.model_type in ("mistral", "gemma3_text"):
        keys["attention.sliding_window"] = config.sliding_window
    if config.model_type == "gemma3_text":
        is_local = [kind == "sliding_attention" for kind in config.layer_types]
        keys["attention.sliding_window_pattern"] = np.array(is_local)
    if experts := getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None):
        keys |= {"expert_count": experts, "expert_used_count": config.num_experts_per_tok}
        if config.model_type != "mixtral":
            keys["expert_feed_forward_length"] = config.moe_intermediate_size
            keys["expert_weights_norm"] = bool(config.norm_topk_prob)
        if config.model_type == "qwen2_moe":
            keys["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    return {"general.architecture": arch, **{f"{arch}.{k}": v for k, v in keys.items()}, **rope_metadata(config, arch)}


def write(
    model: torch.nn.Module,
    path: Path,
    choose: Callable[[str, tuple[int, ...]], WeightType] = lambda name, shape: WeightType.F32,
    padding_rows: int = 0,
    vocabulary: Mapping[str, Any] | None = None,
) -> None:
    """Writes the model. `choose` gives each matrix its type; `padding_rows` more rows pad the vocabulary; `vocabulary`
    is metadata about it."""
    tensors = []
    for name, values in [*arrays(model), *rope_tensors(model)]:
        if padding_rows and name in ("token_embd.weight", "output.weight"):
            values = np.concatenate([values, np.full((padding_rows, values.shape[1]), 9.0, np.float32)])
        kind = choose(name, values.shape) if values.ndim > 1 and "ffn_gate_inp" not in name else WeightType.F32
        tensors.append(Tensor.quantize(name, values, kind))
    gguf.write(path, {**metadata(model), **(vocabulary or {})}, tensors)
