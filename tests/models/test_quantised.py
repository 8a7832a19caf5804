"""Every weight type on every instruction set here, against the reference in its family's mode and in float."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from pelton import _core
from pelton.backends.cpu import packing
from pelton.formats import checkpoint
from pelton.formats.quants import WeightType, is_supported
from pelton.models import base
from pelton.ops.reference import Family
from tests import tolerances
from tests.models import convert, stepping, tiny

WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8, "num_hidden_layers": 2}
"""K-quants want multiples of 256."""
TYPES = [type for type in WeightType if is_supported(type) and _core.Machine("", 1).family(type) >= 0]
"""All that the backend has kernels for; tests/kernels says which those must be."""
LENGTHS = tuple(4 + s % 6 for s in range(24))
"""Many short texts: a value beside a rounding border that falls to its other side spoils one text, not all."""
PLAN = [[length - 2 for length in LENGTHS], [s % 2 for s in range(24)], [1] * 24, [1 - s % 2 for s in range(24)]]


@cache
def sequences() -> tuple[list[int], ...]:
    rng = np.random.default_rng(4)
    return tuple(rng.integers(0, tiny.VOCAB, n).tolist() for n in LENGTHS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quantised")


def loaded(type: WeightType, folder: Path) -> base.Model:
    path = folder / f"{type.name}.gguf"
    if not path.exists():
        convert.write(tiny.build("llama", **WIDE), path, lambda name, shape: type)
    return base.load(checkpoint.open(path))


def family_on(isa: str, type: WeightType) -> Family:
    family = packing.FAMILIES[_core.Machine(isa, 1).family(type)]
    return {"f32": "float", "int8": "int8", "bf16": "bf16"}[family]


def errors(model: base.Model, run_step: stepping.RunStep, oracle: stepping.RunStep) -> np.ndarray:
    """Of each text."""
    got, want = (stepping.run(run, model.config.groups, sequences(), PLAN) for run in (run_step, oracle))
    return np.array([stepping.error(g, w) for g, w in zip(got, want, strict=True)])


@pytest.mark.parametrize("isa", _core.isas())
@pytest.mark.parametrize("type", TYPES, ids=lambda type: type.name)
def test_backend_equals_the_reference_in_its_familys_mode(type: WeightType, isa: str, folder: Path):
    model = loaded(type, folder)
    run_step = stepping.on_backend(model, len(LENGTHS), max(LENGTHS), "f32", isa=isa)
    oracle = stepping.on_reference(model, len(LENGTHS), max(LENGTHS), "f32", lambda type: family_on(isa, type))
    of_texts = errors(model, run_step, oracle)
    tight, flipped = tolerances.SAME_FAMILY[family_on(isa, type)]
    assert np.quantile(of_texts, 0.75) < tight
    assert of_texts.max() < flipped


@pytest.mark.parametrize("type", TYPES, ids=lambda type: type.name)
def test_backends_default_is_near_the_reference_in_float(type: WeightType, folder: Path):
    model = loaded(type, folder)
    run_step = stepping.on_backend(model, len(LENGTHS), max(LENGTHS), "bf16")
    oracle = stepping.on_reference(model, len(LENGTHS), max(LENGTHS), "f32")
    of_texts = errors(model, run_step, oracle)
    assert of_texts.max() < tolerances.DEFAULT[family_on("", type)]


@pytest.mark.parametrize("case", ["qwen2", "qwen3", "gemma3", "mistral-window", "llama-biases"])
def test_every_familys_default_is_near_the_reference_in_float(case: str, folder: Path):
    path = folder / f"{case}.gguf"
    convert.write(tiny.build(case), path, lambda name, shape: WeightType.Q8_0)
    model = base.load(checkpoint.open(path))
    run_step = stepping.on_backend(model, len(LENGTHS), max(LENGTHS), "bf16")
    oracle = stepping.on_reference(model, len(LENGTHS), max(LENGTHS), "f32")
    assert errors(model, run_step, oracle).max() < tolerances.DEFAULT[family_on("", WeightType.Q8_0)]
