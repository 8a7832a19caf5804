"""The exactness law on logits, bit for bit: alone = batched = chunked = on any number of threads."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from pelton.formats import checkpoint
from pelton.formats.quants import WeightType
from pelton.models import base
from tests.models import convert, stepping, tiny

LENGTH = 560  # over two of attention's pieces of 256, and over the window many times
OTHERS = (33, 5, 64, 1, 100, 17, 32)
CASES = {
    "llama": ("llama", WeightType.Q4_0, {"max_position_embeddings": 1024}),
    "mistral-window": ("mistral-window", WeightType.Q8_0, {"max_position_embeddings": 1024}),
    "gemma3": ("gemma3", WeightType.F16, {"max_position_embeddings": 1024}),
}


@cache
def sequences() -> tuple[list[int], ...]:
    rng = np.random.default_rng(6)
    return tuple(rng.integers(0, tiny.VOCAB, n).tolist() for n in (LENGTH, *OTHERS))


@pytest.fixture(scope="module", params=CASES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> base.Model:
    case, type, changes = CASES[request.param]
    path = tmp_path_factory.mktemp("exactness") / "model.gguf"
    convert.write(tiny.build(case, **changes), path, lambda name, shape: type)
    return base.load(checkpoint.open(path))


def alone(model: base.Model, plan: list[list[int]], num_threads: int = 2) -> stepping.Logits:
    run_step = stepping.on_backend(model, 1, LENGTH, "f16", num_threads)
    return stepping.run(run_step, model.config.groups, sequences()[:1], plan)[0]


@pytest.fixture(scope="module")
def whole(model: base.Model) -> stepping.Logits:
    logits = alone(model, [[LENGTH]])
    assert np.isfinite(logits).all()
    assert len(np.unique(logits[-1])) > 1
    return logits


def chunks(size: int) -> list[list[int]]:
    return [[min(size, LENGTH - start)] for start in range(0, LENGTH, size)]


@pytest.mark.parametrize("size", [5, 37, 256])
def test_chunks_change_no_bit(model: base.Model, whole: stepping.Logits, size: int):
    assert np.array_equal(alone(model, chunks(size)), whole)


def test_decoding_changes_no_bit(model: base.Model, whole: stepping.Logits):
    assert np.array_equal(alone(model, [[LENGTH - 24], *([1] for _ in range(24))]), whole)


@pytest.mark.parametrize("num_threads", [1, 3, 5])
def test_threads_change_no_bit(model: base.Model, whole: stepping.Logits, num_threads: int):
    assert np.array_equal(alone(model, chunks(300), num_threads), whole)


def mixed_steps() -> list[list[int]]:
    """All sequences to their ends: prefills next to chunks next to decodes, in turns."""
    left = [len(s) for s in sequences()]
    plan = []
    while any(left):
        counts = [min(n, (61, 1, 7)[(len(plan) + s) % 3]) for s, n in enumerate(left)]
        left = [n - count for n, count in zip(left, counts, strict=True)]
        plan.append(counts)
    return plan


def test_neighbours_change_no_bit(model: base.Model, whole: stepping.Logits):
    run_step = stepping.on_backend(model, len(sequences()), LENGTH, "f16")
    together = stepping.run(run_step, model.config.groups, sequences(), mixed_steps())
    assert np.array_equal(together[0], whole)
    for s, want in enumerate(together):
        (got,) = stepping.run(run_step, model.config.groups, sequences()[s : s + 1], [[len(sequences()[s])]])
        assert np.array_equal(got, want)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 5])
def test_batches_of_every_size_change_no_bit(model: base.Model, whole: stepping.Logits, num_threads: int):
    """Sequences that decode side by side: one in the first step, one more in each, 64 in the last."""
    count = 64
    starts = [sequences()[0][s : s + count - s] for s in range(count)]
    run_step = stepping.on_backend(model, count, count, "f16", num_threads)
    plan = [[int(s <= step) for s in range(count)] for step in range(count)]
    together = stepping.run(run_step, model.config.groups, starts, plan)
    assert np.array_equal(together[0], whole[:count])
    for s in range(1, count, 7):
        (got,) = stepping.run(run_step, model.config.groups, starts[s : s + 1], [[count - s]])
        assert np.array_equal(together[s], got)
