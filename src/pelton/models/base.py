"""What a model is: a checked config, weights under our names, and its entry points, `step` and `pool`: functions over
ops.

`load` finds the family by the checkpoint's `general.architecture`. The runner takes the result to a backend.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from pelton.errors import ConfigError, UnsupportedModel
from pelton.formats.checkpoint import Checkpoint
from pelton.models import rope
from pelton.models.metadata import Metadata
from pelton.models.weights import Expected, collect
from pelton.ops.data import CacheGroup, Weight
from pelton.ops.spec import Activation, AttendSpec, RopeSpec

MAX_CONTEXT = 1 << 27
_UNUSED_TOKEN = 5  # in tokenizer.ggml.token_type


@dataclass(frozen=True)
class Layer:
    """What differs between layers: rope, window, and the place of its keys (cache group, slot within it)."""

    rope: RopeSpec
    window: int | None
    group: int
    slot: int


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the gated MLP; `shared_width` 0: no shared expert."""

    count: int
    chosen: int
    width: int
    normalize: bool
    shared_width: int = 0


@dataclass(frozen=True)
class ModelConfig:
    """A decoder's dimensions and choices, all checked against the file's metadata.

    `vocab_size` counts the tokens that can be sampled; the embedding may have more rows (`num_embeddings`).
    `context` is the number of tokens that a sequence may hold. `head` names the output weight: "embed" where tied.
    """

    architecture: str
    width: int
    ffn_width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    vocab_size: int
    num_embeddings: int
    context: int
    layers: tuple[Layer, ...]
    groups: tuple[CacheGroup, ...]
    attention_scale: float
    head: Literal["embed", "head"]
    activation: Activation = "silu"
    embed_scale: float = 1.0
    logit_softcap: float | None = None
    experts: Experts | None = None

    def attend_spec(self, i: int) -> AttendSpec:
        """How layer i attends."""
        layer = self.layers[i]
        return AttendSpec(
            layer=i,
            group=layer.group,
            slot=layer.slot,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            value_dim=self.head_dim,
            scale=self.attention_scale,
            window=layer.window,
        )


Hidden = Callable[[Any, Mapping[str, Any], Any, ModelConfig], Any]
"""(ops, weights, batch, config) -> [R, D], the final hidden states of `logit_rows`: the model, but for its head."""


@dataclass(frozen=True)
class Family:
    """One architecture: how its metadata is read, which tensors it has, and what it computes."""

    configure: Callable[[Metadata, int], ModelConfig]
    expect: Callable[[ModelConfig], Sequence[Expected]]
    hidden: Hidden


@dataclass(frozen=True)
class Model:
    """A checkpoint made ready for a backend: nothing copied yet but small vectors."""

    config: ModelConfig
    weights: Mapping[str, Weight]
    family: Family

    def pool(self, ops: Any, weights: Mapping[str, Any], batch: Any) -> Any:
        """The entry point of embeddings: [R, D], the final hidden states of `logit_rows`."""
        return self.family.hidden(ops, weights, batch, self.config)

    def step(self, ops: Any, weights: Mapping[str, Any], batch: Any) -> Any:
        """The entry point of generation, as `LoadSpec.record` wants it: [R, vocab], the head over `pool`."""
        cfg = self.config
        h = self.pool(ops, weights, batch)
        return ops.logits(h, weights[cfg.head], num_valid=cfg.vocab_size, softcap=cfg.logit_softcap)


_FAMILIES = {name: f"pelton.models.{name}" for name in ("gemma3", "llama", "qwen2", "qwen2moe", "qwen3", "qwen3moe")}
"""`general.architecture` -> the module whose FAMILY runs it."""


def find(architecture: str) -> Family:
    """The family of that name. Raises UnsupportedModel, which lists those that exist."""
    if architecture not in _FAMILIES:
        known = ", ".join(_FAMILIES)
        raise UnsupportedModel(f"models of architecture {architecture!r} are not supported; there are: {known}")
    family: Family = importlib.import_module(_FAMILIES[architecture]).FAMILY
    return family


def load(checkpoint: Checkpoint, context: int = 0) -> Model:
    """The model in a checkpoint. `context`: tokens a sequence may hold; 0: what the model was trained for.

    Raises FormatError (metadata or tensors missing, surplus, absurd) or UnsupportedModel.
    """
    meta = Metadata(checkpoint)
    family = find(meta.architecture)
    config = family.configure(meta, context)
    weights = collect(meta.file, checkpoint.tensors, family.expect(config), rope.factor_tensors(meta))
    return Model(config, weights, family)


def read_config(
    meta: Metadata,
    context: int,
    *,
    windows: Callable[[int], Sequence[int | None]] = lambda num_layers: [None] * num_layers,
    local_rope_base: float | None = None,
    **choices: Any,
) -> ModelConfig:
    """The config that most decoders share; `choices` override fields of ModelConfig.

    `windows(num_layers)` gives each layer's window. Layers that have one use `local_rope_base`, unscaled, if given.
    """
    width = meta.integer("embedding_length", high=1 << 17)
    num_layers = meta.integer("block_count", high=1024)
    num_heads, num_kv_heads, head_dim = _heads(meta, width)
    trained, context = _context(meta, context)
    layers, groups = place_layers(
        windows(num_layers), read_ropes(meta, head_dim, trained, context, local_rope_base), num_kv_heads, head_dim
    )
    num_embeddings = _num_embeddings(meta)
    softcap = meta.number("final_logit_softcapping", low=0, high=1e4, default=0.0)
    fields: dict[str, Any] = {
        "architecture": meta.architecture,
        "width": width,
        "ffn_width": meta.integer("feed_forward_length", high=1 << 20),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "norm_eps": meta.number("attention.layer_norm_rms_epsilon", low=1e-12, high=0.1),
        "vocab_size": _vocab_size(meta, num_embeddings),
        "num_embeddings": num_embeddings,
        "context": context,
        "layers": layers,
        "groups": groups,
        "attention_scale": meta.number("attention.scale", low=0, high=1e3, default=0.0) or 1 / math.sqrt(head_dim),
        "head": "head" if "output.weight" in meta.checkpoint.tensors else "embed",
        "logit_softcap": softcap or None,
    }
    return ModelConfig(**(fields | choices))


def _heads(meta: Metadata, width: int) -> tuple[int, int, int]:
    """How many there are, of queries and of keys, and how wide one is."""
    num_heads = meta.integer("attention.head_count", high=1024)
    num_kv_heads = meta.integer("attention.head_count_kv", high=1024, default=num_heads)
    if num_heads % num_kv_heads:
        raise meta.wrong("attention.head_count_kv", f"is {num_kv_heads}, which does not divide {num_heads} heads")
    if not meta.has("attention.key_length") and width % num_heads:
        raise meta.wrong("embedding_length", f"is {width}, no multiple of {num_heads} heads")
    head_dim = meta.integer("attention.key_length", high=1024, default=width // num_heads)
    if meta.integer("attention.value_length", high=1024, default=head_dim) != head_dim:
        raise UnsupportedModel(f"{meta.file}: {meta.architecture} models whose keys and values differ in width")
    return num_heads, num_kv_heads, head_dim


def _context(meta: Metadata, context: int) -> tuple[int, int]:
    """What the model was trained for, and what is to be used where `context` is asked for, 0: all of it."""
    trained = meta.integer("context_length", high=MAX_CONTEXT)
    if not 0 <= context <= trained:
        raise ConfigError(
            f"context: {meta.file} was trained for {trained} tokens, {context} were asked", param="context"
        )
    return trained, context or trained


def read_ropes(
    meta: Metadata, head_dim: int, trained: int, context: int, local_base: float | None
) -> tuple[RopeSpec, RopeSpec]:
    """The ropes of layers without and with a window."""
    dim = meta.integer("rope.dimension_count", low=2, high=head_dim, default=head_dim)
    if dim % 2:
        raise meta.wrong("rope.dimension_count", f"is {dim}, which is odd")
    base = meta.number("rope.freq_base", low=2.0, high=1e12, default=10000.0)
    scaled = rope.read(meta, base=base, dim=dim, trained=trained, context=context)
    if local_base is None:
        return scaled, scaled
    return scaled, RopeSpec(dim, tuple(float(f) for f in rope.base_frequencies(local_base, dim)))


def place_layers(
    windows: Sequence[int | None], ropes: tuple[RopeSpec, RopeSpec], num_kv_heads: int, head_dim: int
) -> tuple[tuple[Layer, ...], tuple[CacheGroup, ...]]:
    """Layers by their windows: those with the same one share a cache group, in order of first appearance."""
    kinds = list(dict.fromkeys(windows))
    layers = tuple(
        Layer(ropes[window is not None], window, kinds.index(window), list(windows[:i]).count(window))
        for i, window in enumerate(windows)
    )
    groups = tuple(
        CacheGroup("full" if w is None else "window", list(windows).count(w), num_kv_heads, head_dim, head_dim, w)
        for w in kinds
    )
    return layers, groups


def _num_embeddings(meta: Metadata) -> int:
    tensor = meta.checkpoint.tensors.get("token_embd.weight")
    return tensor.shape[0] if tensor is not None else meta.integer("vocab_size", high=1 << 24)


def _vocab_size(meta: Metadata, num_embeddings: int) -> int:
    """Tokens that can be sampled: those of the tokenizer without the unused ones at its end, which pad the
    matrix; without a tokenizer, what the file says, or all rows."""
    types = meta.checkpoint.metadata.get("tokenizer.ggml.token_type")
    if isinstance(types, np.ndarray):
        used = np.flatnonzero(types[:num_embeddings] != _UNUSED_TOKEN)
        return int(used[-1]) + 1 if used.size else num_embeddings
    tokens = meta.checkpoint.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and tokens:
        return min(len(tokens), num_embeddings)
    return meta.integer("vocab_size", high=num_embeddings, default=num_embeddings)
