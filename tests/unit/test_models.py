"""Configs and weights out of checkpoints: what is read, and that what is wrong is refused by name."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from pelton.errors import ConfigError, FormatError, UnsupportedModel
from pelton.formats.checkpoint import Checkpoint, Tensor
from pelton.formats.digest import FileStamp, ModelFile
from pelton.formats.quants import WeightType
from pelton.models import base
from pelton.models.weights import unpermute

WIDTH, FFN, VOCAB, HEADS, KV_HEADS, LAYERS = 64, 96, 50, 4, 2, 2
METADATA = {
    "general.architecture": "llama",
    "llama.block_count": LAYERS,
    "llama.context_length": 256,
    "llama.embedding_length": WIDTH,
    "llama.feed_forward_length": FFN,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


def _shapes() -> dict[str, tuple[int, ...]]:
    kv = WIDTH // HEADS * KV_HEADS
    layer = {
        "attn_norm": (WIDTH,),
        "attn_q": (WIDTH, WIDTH),
        "attn_k": (kv, WIDTH),
        "attn_v": (kv, WIDTH),
        "attn_output": (WIDTH, WIDTH),
        "ffn_norm": (WIDTH,),
        "ffn_gate": (FFN, WIDTH),
        "ffn_up": (FFN, WIDTH),
        "ffn_down": (WIDTH, FFN),
    }
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, WIDTH), "output_norm.weight": (WIDTH,)}
    return shapes | {f"blk.{i}.{name}.weight": shape for i in range(LAYERS) for name, shape in layer.items()}


def _tensor(name: str, shape: tuple[int, ...], type: WeightType = WeightType.F32) -> Tensor:
    return Tensor.quantize(name, np.arange(np.prod(shape)).reshape(shape) % 100, type)


def checkpoint(metadata: dict[str, Any] | None = None, **tensors: Tensor | None) -> Checkpoint:
    """A tiny llama. None as a value takes a key or a tensor away; `__` in a tensor's keyword stands for a dot."""
    keys = {key: value for key, value in (METADATA | (metadata or {})).items() if value is not None}
    held: dict[str, Tensor | None] = {name: _tensor(name, shape) for name, shape in _shapes().items()}
    held |= {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    kept = {name: tensor for name, tensor in held.items() if tensor is not None}
    return Checkpoint(keys, kept, (ModelFile("tiny.gguf", FileStamp(0, 0, 0)),))


def gemma(**metadata: Any) -> dict[str, Any]:
    keys = {key.replace("llama.", "gemma3."): value for key, value in METADATA.items()}
    return keys | {"general.architecture": "gemma3", "gemma3.attention.sliding_window": 24, **metadata}


def gemma_config(**metadata: Any) -> base.ModelConfig:
    meta = base.Metadata(Checkpoint(gemma(**metadata), {}, (ModelFile("g.gguf", FileStamp(0, 0, 0)),)))
    return base.find("gemma3").configure(meta, 0)


@pytest.mark.parametrize("key", [key for key in METADATA if key != "llama.attention.head_count_kv"])
def test_a_missing_key_is_named(key: str):
    with pytest.raises(FormatError, match=re.escape(key)):
        base.load(checkpoint({key: None}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.block_count", 0),
        ("llama.block_count", 1 << 40),
        ("llama.block_count", -1),
        ("llama.block_count", True),
        ("llama.block_count", "2"),
        ("llama.embedding_length", 1 << 30),
        ("llama.embedding_length", 65),
        ("llama.feed_forward_length", 0),
        ("llama.attention.head_count", 0),
        ("llama.attention.head_count", 5),
        ("llama.attention.head_count_kv", 3),
        ("llama.attention.key_length", 1 << 20),
        ("llama.attention.layer_norm_rms_epsilon", 0.0),
        ("llama.attention.layer_norm_rms_epsilon", float("nan")),
        ("llama.context_length", 0),
        ("llama.context_length", 1.5),
        ("llama.rope.dimension_count", 15),
        ("llama.rope.freq_base", float("inf")),
        ("llama.rope.freq_base", 1.0),
        ("llama.rope.scaling.factor", -1.0),
        ("llama.rope.scaling.type", 3),
        ("llama.expert_used_count", 9),
    ],
)
def test_an_absurd_value_is_refused_by_name(key: str, value: Any):
    with pytest.raises(FormatError, match=re.escape(key)):
        base.load(checkpoint({"llama.expert_count": 4 if "expert" in key else None, key: value}))


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("general.architecture", "mamba", "llama, qwen2"),
        ("llama.rope.scaling.type", "dynamic", "linear"),
        ("llama.rope.dimension_count", 8, "rotate"),
        ("llama.attention.max_alibi_bias", 8.0, "max_alibi_bias"),
        ("llama.attention.causal", False, "causal"),
        ("llama.attention.value_length", 8, "differ in width"),
        ("llama.attention.head_count_kv", np.array([2, 1], np.int32), "differs between layers"),
    ],
)
def test_what_cannot_be_run_is_refused_with_a_reason(key: str, value: Any, named: str):
    with pytest.raises(UnsupportedModel, match=named):
        base.load(checkpoint({key: value}))


def test_a_file_without_an_architecture_is_refused():
    with pytest.raises(FormatError, match=r"tiny.gguf.*general.architecture"):
        base.load(checkpoint({"general.architecture": None}))


def test_equal_values_per_layer_are_one_value():
    model = base.load(checkpoint({"llama.attention.head_count_kv": np.array([2, 2], np.int32)}))
    assert model.config.num_kv_heads == 2


def test_a_missing_tensor_is_named_with_its_shape():
    with pytest.raises(FormatError, match=r"tiny.gguf: tensor 'blk.1.ffn_up.weight' of shape \(96, 64\) is missing"):
        base.load(checkpoint(blk__1__ffn_up__weight=None))


def test_a_surplus_tensor_is_named():
    with pytest.raises(FormatError, match=r"no place for tensor 'blk.2.attn_q.weight'"):
        base.load(checkpoint(blk__2__attn_q__weight=_tensor("blk.2.attn_q.weight", (2, 2))))


def test_longropes_factors_without_longrope_have_no_place():
    with pytest.raises(FormatError, match=r"no place for tensor 'rope_factors_long.weight'"):
        base.load(checkpoint(rope_factors_long__weight=_tensor("rope_factors_long.weight", (8,))))


def test_a_wrong_shape_is_named_beside_the_right_one():
    with pytest.raises(FormatError, match=r"'blk.0.attn_k.weight' has shape \(64, 64\), the model wants \(32, 64\)"):
        base.load(checkpoint(blk__0__attn_k__weight=_tensor("blk.0.attn_k.weight", (64, 64))))


def test_a_weight_type_without_codec_is_refused():
    data = np.zeros(WIDTH * 32, np.uint8)
    tensor = Tensor("blk.0.attn_v.weight", WeightType.I8, (32, WIDTH), data)
    with pytest.raises(UnsupportedModel, match=r"'blk.0.attn_v.weight'.*I8"):
        base.load(checkpoint(blk__0__attn_v__weight=tensor))


def test_a_tied_model_has_one_copy_and_an_untied_one_a_head():
    tied = base.load(checkpoint())
    untied = base.load(checkpoint(output__weight=_tensor("output.weight", (VOCAB, WIDTH), WeightType.Q8_0)))
    assert tied.config.head == "embed"
    assert "head" not in tied.weights
    assert untied.config.head == "head"
    assert untied.weights["head"].type == WeightType.Q8_0


def test_only_q_and_k_of_llama_are_permuted_each_by_its_own_heads():
    bias = _tensor("blk.0.attn_k.bias", (32,))
    weights = base.load(checkpoint(blk__0__attn_k__bias=bias)).weights
    assert {name.split(".")[-1] for name, w in weights.items() if w.row_order is not None} == {"q", "k"}
    q, k = weights["layers.0.q"].row_order, weights["layers.0.k"].row_order
    assert q is not None
    assert k is not None
    assert q[:16].tolist() == k[:16].tolist() == [0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15]
    assert q[16] == k[16] == 16
    assert weights["layers.0.k_bias"].data.view(np.float32)[:32].tolist() == k.tolist()


def test_unpermute_undoes_the_interleaving_of_halves():
    rows = np.arange(24)
    interleaved = rows.reshape(3, 2, 4).swapaxes(1, 2).reshape(-1)
    assert (interleaved[unpermute(24, 3)] == rows).all()


def test_padding_rows_are_not_in_the_vocabulary():
    tokens = {"tokenizer.ggml.tokens": [f"t{i}" for i in range(VOCAB)]}
    types = np.array([1] * 40 + [5, 1] + [5] * 8, np.int32)
    assert base.load(checkpoint(tokens)).config.vocab_size == VOCAB
    assert base.load(checkpoint(tokens | {"tokenizer.ggml.token_type": types})).config.vocab_size == 42
    assert base.load(checkpoint({"tokenizer.ggml.tokens": ["a"] * 47})).config.vocab_size == 47
    assert base.load(checkpoint({"llama.vocab_size": 48})).config.vocab_size == 48


def test_layers_with_the_same_window_share_a_group():
    config = gemma_config(**{"gemma3.block_count": 7, "gemma3.vocab_size": 50})
    assert [layer.window for layer in config.layers] == [24, 24, 24, 24, 24, None, 24]
    assert [(g.kind, g.num_layers, g.window) for g in config.groups] == [("window", 6, 24), ("full", 1, None)]
    assert [(layer.group, layer.slot) for layer in config.layers] == [(0, i) for i in range(5)] + [(1, 0), (0, 5)]
    assert config.attend_spec(6).window == 24
    assert config.layers[0].rope.inv_freq[1] == pytest.approx(10000 ** (-2 / 16))


@pytest.mark.parametrize(("pattern", "num_local"), [(3, 4), (np.array([True] * 5 + [False]), 5)])
def test_gemmas_pattern_is_read_as_a_period_or_per_layer(pattern: Any, num_local: int):
    keys = {"gemma3.block_count": 6, "gemma3.vocab_size": 50, "gemma3.attention.sliding_window_pattern": pattern}
    assert sum(layer.window is not None for layer in gemma_config(**keys).layers) == num_local


def test_gemma_27b_scales_queries_by_its_width_per_head():
    shape = {"gemma3.embedding_length": 5376, "gemma3.attention.head_count": 32, "gemma3.attention.key_length": 128}
    large = gemma_config(**shape, **{"gemma3.block_count": 62, "gemma3.vocab_size": 50})
    small = gemma_config(**shape, **{"gemma3.block_count": 48, "gemma3.vocab_size": 50})
    assert large.attention_scale == pytest.approx(168**-0.5)
    assert small.attention_scale == pytest.approx(128**-0.5)


def test_the_old_spelling_of_linear_scaling_is_read():
    plain = base.load(checkpoint()).config.layers[0].rope.inv_freq
    for keys in ({"llama.rope.scale_linear": 4.0}, {"llama.rope.scaling.factor": 4.0}):
        scaled = base.load(checkpoint(keys)).config.layers[0].rope.inv_freq
        assert scaled == tuple(f / 4 for f in plain)
    assert base.load(checkpoint({"llama.rope.scaling.type": "none"})).config.layers[0].rope.inv_freq == plain


def test_a_factor_on_cos_and_sin_multiplies_that_of_the_scaling():
    yarn = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    plain = base.load(checkpoint(yarn)).config.layers[0].rope.scale
    twice = base.load(checkpoint(yarn | {"llama.rope.scaling.attn_factor": 2.0})).config.layers[0].rope.scale
    assert plain > 1
    assert twice == 2 * plain


def test_rope_factors_of_the_wrong_shape_are_refused():
    with pytest.raises(FormatError, match=r"'rope_freqs.weight' has shape \(5,\), not \(8,\)"):
        base.load(checkpoint(rope_freqs__weight=_tensor("rope_freqs.weight", (5,))))
    with pytest.raises(FormatError, match=r"'rope_freqs.weight' has values that are not positive"):
        base.load(checkpoint(rope_freqs__weight=_tensor("rope_freqs.weight", (8,))))


def test_the_context_asked_for_is_kept():
    assert base.load(checkpoint()).config.context == 256
    assert base.load(checkpoint(), context=100).config.context == 100
    for wrong in (257, -1):
        with pytest.raises(ConfigError, match=f"trained for 256 tokens, {wrong} were asked"):
            base.load(checkpoint(), context=wrong)
