"""`pelton bench quality` over a tiny model: its baseline, its candidates, its command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from pelton import _core
from pelton.bench import quality
from pelton.bench.quality import OnBackend, OnReference, Options
from pelton.cli.main import main
from pelton.errors import ConfigError
from pelton.formats import checkpoint, gguf
from pelton.formats.quants import WeightType
from pelton.models import base
from pelton.ops import reference
from pelton.text.tokenizer import Tokenizer
from tests import tolerances
from tests.models import convert, stepping, tiny
from tests.unit.vocabularies import byte_level

CONTEXT = 150  # two whole steps and a part, the last block not full
VOCABULARY = byte_level(size=280)
VOCAB = len(VOCABULARY["tokenizer.ggml.tokens"])
OPTIONS = Options(num_threads=2, context=CONTEXT)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of Q8_0 with a vocabulary."""
    path = tmp_path_factory.mktemp("quality") / "tiny.gguf"
    convert.write(tiny.build("llama", vocab_size=VOCAB), path, lambda name, shape: WeightType.Q8_0)
    opened = checkpoint.open(path)
    whole = path.with_name("whole.gguf")
    gguf.write(whole, dict(opened.metadata) | VOCABULARY, list(opened.tensors.values()))
    return whole


@pytest.fixture(scope="module")
def model(path: Path) -> base.Model:
    return base.load(checkpoint.open(path))


@pytest.fixture(scope="module")
def window() -> np.ndarray:
    return np.random.default_rng(0).integers(3, VOCAB, CONTEXT).astype(np.int32)


def whole(candidate: quality.Candidate, ids: np.ndarray) -> np.ndarray:
    parts = list(candidate.logits(ids))
    assert all(len(part) <= quality.STEP_TOKENS for part in parts)
    return np.concatenate(parts)


def test_the_baseline_is_the_reference_in_float(model: base.Model, window: np.ndarray):
    baseline = whole(quality.load_baseline(model, OPTIONS), window)
    run_step = stepping.on_reference(model, 1, CONTEXT)
    expected = stepping.run(run_step, model.config.groups, [window.tolist()], [[CONTEXT]])[0]
    assert stepping.error(baseline, expected) < tolerances.PARITY_REFERENCE
    np.testing.assert_array_equal(whole(quality.load_baseline(model, OPTIONS), window[:100]), baseline[:100])


def test_the_reference_in_a_family_is_the_backend(model: base.Model, window: np.ndarray):
    backend = whole(OnBackend("", model, "generic", "bf16", OPTIONS), window)
    expected = whole(OnReference(model, reference.bind(model.weights), "int8", "bf16", OPTIONS), window)
    assert stepping.error(backend, expected) < tolerances.SAME_FAMILY["int8"][1]


def test_unordered_sums_of_bf16_are_the_bf16_familys(model: base.Model, window: np.ndarray):
    ids = window[:40]
    exact = whole(OnReference(model, reference.bind(model.weights), "bf16", "f32", OPTIONS), ids)
    unordered = whole(OnReference(model, reference.bind(model.weights), "bf16-unordered", "f32", OPTIONS), ids)
    assert 0 < stepping.error(unordered, exact) < tolerances.SAME_FAMILY["bf16"][1]


def test_the_order_of_quality(model: base.Model, window: np.ndarray):
    """bf16 operands lie nearer to float32 than int8 activations do; the baseline has no distance from itself."""
    baseline = quality.load_baseline(model, OPTIONS)
    candidates = [
        quality.load_baseline(model, OPTIONS),
        OnReference(model, reference.bind(model.weights), "bf16-unordered", "f32", OPTIONS),
        OnBackend("int8", model, "generic", "f32", OPTIONS),
    ]
    seen: list[int] = []
    results = quality.compare(
        baseline, candidates, [window, window[::-1].copy()], lambda known: seen.append(known[0].num_tokens)
    )
    assert seen == [CONTEXT - 1, 2 * (CONTEXT - 1)]
    itself, same, bf16, int8 = (result.mean_divergence.value for result in results)
    assert itself == same == 0
    assert 0 < bf16 < int8 / 2 < 0.1
    assert results[0].perplexity == results[1].perplexity != results[3].perplexity


def test_windows_follow_each_other_after_the_begin_token():
    windows = quality.cut(range(100, 130), context=8, num_tokens=25, begin=1)
    assert [ids.tolist() for ids in windows] == [[1, *range(start, start + 7)] for start in (100, 107, 114)]
    assert quality.cut(range(16), context=8, num_tokens=16, begin=None)[1].tolist() == list(range(8, 16))
    with pytest.raises(ConfigError, match="the text has 15 tokens, 16 were asked"):
        quality.cut(range(15), context=8, num_tokens=16, begin=None)
    with pytest.raises(ConfigError, match="5 tokens hold no window of 8"):
        quality.cut(range(15), context=8, num_tokens=5, begin=None)


def test_the_command(path: Path, tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox does not jump over 1234567890 lazy dogs. " * 5)
    arguments = [str(path), "--text", str(text), "--context", "20", "--tokens", "40", "--isa", "generic"]
    arguments += ["--kv-dtype", "bf16", "--reference", "float"]
    runner = CliRunner()
    shown = runner.invoke(main, ["bench", "quality", *arguments])
    assert shown.exit_code == 0, shown.output
    assert "text.txt; windows of 20 tokens" in shown.output
    lines = [
        json.loads(line) for line in runner.invoke(main, ["bench", "quality", *arguments, "--json"]).stdout.splitlines()
    ]
    assert [line["name"] for line in lines] == [
        "baseline: float32, kv f32",
        "generic, kv bf16",
        "reference float, kv bf16",
    ]
    assert {(line["model"], line["text"], line["context"], line["num_tokens"]) for line in lines} == {
        ("whole.gguf", "text.txt", 20, 38)
    }
    assert lines[1]["mean_divergence"]["value"] > 0


def test_the_shipped_text_is_long_enough_for_many_windows(path: Path):
    text, name = quality.shipped_text()
    assert "pydoc_data.topics of Python 3." in name
    assert len(text) > 300_000
    refused = CliRunner().invoke(main, ["bench", "quality", str(path), "--tokens", "100000000"])
    assert refused.exit_code == 1
    assert "99999744 were asked" in refused.output  # 195312 whole windows of 512


@pytest.mark.slow
def test_a_real_model_is_as_near_as_docs_quality_says(smollm2: Path):
    """docs/quality.md has 0.0030 for int8 dots and 0.00014 for bf16 operands over four such windows."""
    opened = checkpoint.open(smollm2)
    text, _ = quality.shipped_text()
    windows = quality.cut(Tokenizer(opened.metadata).encode(text, add_special=False), 512, 512, begin=None)
    int8_isa = [isa for isa in _core.isas() if isa != "amx"][-1]
    options = Options(isas=(int8_isa,), kv_types=("f16",), references=("bf16-unordered",), num_threads=2)
    model = base.load(opened, options.context)
    results = quality.compare(quality.load_baseline(model, options), quality.load_candidates(model, options), windows)
    int8, bf16 = (result.mean_divergence.value for result in results[1:])
    assert 0.001 < int8 < 0.0045
    assert 0.00005 < bf16 < int8 / 10
