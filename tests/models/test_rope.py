"""Rotary frequencies of every scaling, at sizes of real models, against those that Transformers computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama import LlamaConfig

from pelton.formats.checkpoint import Checkpoint, Tensor
from pelton.formats.digest import FileStamp, ModelFile
from pelton.formats.quants import WeightType
from pelton.models import rope
from pelton.models.metadata import Metadata
from pelton.ops.spec import RopeSpec

DIM, BASE, TRAINED, ORIGINAL = 128, 500000.0, 131072, 8192


def hf_rope(rope_type: str, length: int | None = None, **parameters: Any) -> tuple[np.ndarray, float]:
    config = LlamaConfig(
        head_dim=DIM,
        max_position_embeddings=TRAINED,
        rope_parameters={"rope_type": rope_type, "rope_theta": BASE, **parameters},
    )
    inv_freq, scale = ROPE_INIT_FUNCTIONS[rope_type](config, None, seq_len=length)
    return inv_freq.double().numpy(), scale


def our_rope(keys: dict[str, Any], tensors: dict[str, Any] | None = None, context: int = TRAINED) -> RopeSpec:
    metadata = {"general.architecture": "llama", **{f"llama.rope.scaling.{k}": v for k, v in keys.items()}}
    held = {name: Tensor.quantize(name, values, WeightType.F32) for name, values in (tensors or {}).items()}
    meta = Metadata(Checkpoint(metadata, held, (ModelFile("x.gguf", FileStamp(0, 0, 0)),)))
    return rope.read(meta, base=BASE, dim=DIM, trained=TRAINED, context=context)


def assert_same(ours: RopeSpec, theirs: tuple[np.ndarray, float]) -> None:
    assert ours.inv_freq == pytest.approx(theirs[0], rel=2e-6)
    assert ours.scale == pytest.approx(theirs[1], rel=1e-6)


def test_linear():
    assert_same(our_rope({"type": "linear", "factor": 8.0}), hf_rope("linear", factor=8.0))


@pytest.mark.parametrize(
    ("keys", "parameters"),
    [
        ({}, {}),
        ({"yarn_attn_factor": 0.9}, {"attention_factor": 0.9}),
        ({"yarn_beta_fast": 20.0, "yarn_beta_slow": 2.0}, {"beta_fast": 20, "beta_slow": 2}),
        ({"yarn_log_multiplier": 0.7}, {"mscale": 1.0, "mscale_all_dim": 0.7}),
    ],
)
def test_yarn(keys: dict[str, Any], parameters: dict[str, Any]):
    ours = our_rope({"type": "yarn", "factor": 4.0, "original_context_length": ORIGINAL, **keys})
    assert_same(ours, hf_rope("yarn", factor=4.0, original_max_position_embeddings=ORIGINAL, **parameters))


@pytest.mark.parametrize("spelling", ["longrope", "su"])
@pytest.mark.parametrize("context", [ORIGINAL, ORIGINAL + 1])
def test_longrope_takes_the_table_for_the_context(spelling: str, context: int):
    short, long = 1 + np.arange(DIM // 2) / 100, 1 + np.arange(DIM // 2)
    ours = our_rope(
        {"type": spelling, "original_context_length": ORIGINAL},
        {"rope_factors_short.weight": short, "rope_factors_long.weight": long},
        context,
    )
    theirs = hf_rope(
        "longrope",
        length=context,
        short_factor=short.tolist(),
        long_factor=long.tolist(),
        original_max_position_embeddings=ORIGINAL,
    )
    assert_same(ours, theirs)


def test_llama3_divisors_come_as_a_tensor():
    theirs = hf_rope(
        "llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=ORIGINAL,
    )
    divisors = rope.base_frequencies(BASE, DIM) / theirs[0]
    assert divisors.max() == pytest.approx(8.0)
    assert_same(our_rope({}, {"rope_freqs.weight": divisors}), theirs)
