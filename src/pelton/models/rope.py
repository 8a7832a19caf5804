"""Rotary frequencies with every scaling that GGUF files name, equal to those that Transformers computes.

inv_freq_i = base^(-2i/dim), then by `rope.scaling.type`:

- none: as they are; linear: divided by the factor (arXiv 2306.15595)
- yarn: blended between both by how often a pair turns within the trained context (arXiv 2309.00071)
- longrope: divided by one of two tables of factors in the file (arXiv 2402.13753)

Llama 3's scaling comes as the tensor `rope_freqs.weight` of divisors, whatever the type says.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from pelton.errors import FormatError, UnsupportedModel
from pelton.models.metadata import Metadata
from pelton.ops.spec import RopeSpec

F64 = npt.NDArray[np.float64]

_ANY, _LONG, _SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
_NAMES = {
    "none": "none",
    "default": "none",
    "linear": "linear",
    "yarn": "yarn",
    "longrope": "longrope",
    "su": "longrope",
}
_MAX_FACTOR = 1e6


def base_frequencies(base: float, dim: int) -> F64:
    """[dim/2]: base^(-2i/dim)."""
    return base ** -(np.arange(0, dim, 2) / dim)


def _divisors(meta: Metadata, name: str, dim: int) -> F64:
    tensor = meta.checkpoint.tensors.get(name)
    if tensor is None:
        raise FormatError(f"{meta.file}: tensor {name!r} is missing")
    if tensor.shape != (dim // 2,):
        raise FormatError(f"{meta.file}: tensor {name!r} has shape {tensor.shape}, not {(dim // 2,)}")
    values = tensor.dequantize().astype(np.float64)
    if not (np.isfinite(values) & (values > 0)).all():
        raise FormatError(f"{meta.file}: tensor {name!r} has values that are not positive and finite")
    return values


def _factor(meta: Metadata) -> float:
    """`rope.scaling.factor`, or its old spelling; 0 means not set, as in llama.cpp."""
    old = meta.number("rope.scale_linear", low=0, high=_MAX_FACTOR, default=1.0)
    return meta.number("rope.scaling.factor", low=0, high=_MAX_FACTOR, default=old) or 1.0


def _mscale(factor: float, multiplier: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0


def _yarn(meta: Metadata, base: float, dim: int, context: int) -> tuple[F64, float]:
    """Frequencies and the factor on cos and sin."""
    if meta.number("rope.scaling.yarn_ext_factor", low=-1, high=1e3, default=1.0) not in (1.0, -1.0):
        raise UnsupportedModel(f"{meta.file}: {meta.architecture}.rope.scaling.yarn_ext_factor other than 1")
    factor = _factor(meta)
    original = meta.integer("rope.scaling.original_context_length", high=1 << 27, default=context)
    fast = meta.number("rope.scaling.yarn_beta_fast", low=1e-3, high=1e6, default=32.0)
    slow = meta.number("rope.scaling.yarn_beta_slow", low=1e-3, high=1e6, default=1.0)

    def pair_turning(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(pair_turning(fast)), 0)
    high = min(math.ceil(pair_turning(slow)), dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low if high != low else 0.001), 0, 1)
    plain = base_frequencies(base, dim)
    inv_freq = plain / factor * ramp + plain * (1 - ramp)

    # `yarn_attn_factor` holds what Transformers calls attention_factor: it replaces the default.
    log_multiplier = meta.number("rope.scaling.yarn_log_multiplier", low=0, high=1e3, default=0.0)
    default = _mscale(factor) / (_mscale(factor, log_multiplier) if log_multiplier else 1.0)
    return inv_freq, meta.number("rope.scaling.yarn_attn_factor", low=1e-3, high=1e3, default=default)


def _longrope(meta: Metadata, base: float, dim: int, trained: int, context: int) -> tuple[F64, float]:
    """One table serves the whole life of a loaded model, as `context` decides: switching between the tables while
    a sequence grows, as Transformers does, would change the meaning of keys that are already stored."""
    original = meta.integer("rope.scaling.original_context_length", low=2, high=1 << 27)
    name = _LONG if context > original else _SHORT
    stretch = trained / original
    default = 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original))
    return base_frequencies(base, dim) / _divisors(meta, name, dim), default


def _kind(meta: Metadata) -> str:
    given = meta.text("rope.scaling.type", default="linear" if _factor(meta) != 1 else "none")
    if given not in _NAMES:
        known = ", ".join(sorted(_NAMES))
        raise UnsupportedModel(f"{meta.file}: rope scaling type {given!r} is not supported; there are: {known}")
    return _NAMES[given]


def factor_tensors(meta: Metadata) -> tuple[str, ...]:
    """Tensors that `read` may use; any other of them in a file would mean something that is not understood."""
    return (_ANY, _LONG, _SHORT) if _kind(meta) == "longrope" else (_ANY,)


def read(meta: Metadata, *, base: float, dim: int, trained: int, context: int) -> RopeSpec:
    """The rope of a file: `trained` is its context length, `context` what sequences may grow to."""
    kind, scale = _kind(meta), 1.0
    inv_freq = base_frequencies(base, dim)
    if kind == "linear":
        inv_freq = inv_freq / _factor(meta)
    elif kind == "yarn":
        inv_freq, scale = _yarn(meta, base, dim, trained)
    elif kind == "longrope":
        inv_freq, scale = _longrope(meta, base, dim, trained, context)
    if _ANY in meta.checkpoint.tensors:
        inv_freq = inv_freq / _divisors(meta, _ANY, dim)
    # longrope's files state the whole factor here, others one on top of their own.
    extra = meta.number("rope.scaling.attn_factor", low=1e-3, high=1e3, default=scale if kind == "longrope" else 1.0)
    scale = extra if kind == "longrope" else scale * extra
    return RopeSpec(dim, tuple(float(f) for f in inv_freq), scale)
