"""Logits of tiny random models of every family against Hugging Face Transformers."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from pelton.formats import checkpoint
from pelton.models import base
from pelton.ops import reference
from pelton.ops.memory import Memory
from tests import tolerances
from tests.models import convert, replay, stepping, tiny

LENGTHS = (90, 41, 7)  # past every window and every original context; over, at most, and under two blocks
MIXED = [[33, 0, 5], [20, 41, 1], *([1, 0, 0] for _ in range(37)), [0, 0, 1]]
"""A prefill; a chunk beside a prefill and a decode; decodes."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@cache
def sequences() -> tuple[list[int], ...]:
    rng = np.random.default_rng(3)
    return tuple(rng.integers(0, tiny.VOCAB, n).tolist() for n in LENGTHS)


@cache
def wanted(case: str) -> tuple[stepping.Logits, ...]:
    model = tiny.build(case)
    return tuple(tiny.logits(model, ids, max(LENGTHS)) for ids in sequences())


def loaded(case: str, folder: Path) -> base.Model:
    path = folder / f"{case}.gguf"
    if not path.exists():
        convert.write(tiny.build(case), path)
    return base.load(checkpoint.open(path))


@pytest.mark.parametrize("case", tiny.CASES)
@pytest.mark.parametrize("plan", [[LENGTHS], MIXED], ids=["whole", "mixed"])
def test_reference_equals_transformers(case: str, plan: list[list[int]], folder: Path):
    model = loaded(case, folder)
    run_step = stepping.on_reference(model, len(LENGTHS), max(LENGTHS))
    got = stepping.run(run_step, model.config.groups, sequences(), plan)
    for g, w in zip(got, wanted(case), strict=True):
        assert stepping.error(g, w) < tolerances.PARITY_REFERENCE


@pytest.mark.parametrize("case", tiny.CASES)
def test_a_recorded_plan_is_the_model(case: str, folder: Path):
    model = loaded(case, folder)
    plan = replay.record(model.step, model.weights)
    replay.lay_out(plan, model.weights)
    weights = reference.bind(model.weights)
    memory = Memory(model.config.groups, stepping.num_blocks(model.config.groups, 1, LENGTHS[1]), "f32")
    run_step = lambda batch: replay.replay(plan, reference.Ops(batch, memory), weights, batch)  # noqa: E731
    (got,) = stepping.run(run_step, model.config.groups, sequences()[1:2], [[LENGTHS[1]]])
    assert stepping.error(got, wanted(case)[1]) < tolerances.PARITY_REFERENCE


def test_in_float64_the_reference_is_an_oracle_for_itself(folder: Path):
    model = loaded("llama", folder)
    got, want = (
        stepping.run(
            stepping.on_reference(model, 1, LENGTHS[1], dtype=dtype), model.config.groups, sequences()[1:2], [[41]]
        )[0]
        for dtype in (np.float32, np.float64)
    )
    assert want.dtype == np.float64
    assert 0 < stepping.error(got, want) < tolerances.PARITY_REFERENCE / 10
