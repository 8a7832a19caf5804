"""The CPU backend on tiny random models: parity with Transformers, and the exactness law with `==`."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from rich.console import Console

from pelton import _core
from pelton.backends.base import BackendConfig, LoadSpec
from pelton.backends.cpu.backend import CpuBackend
from pelton.bench.limits import Limits
from pelton.bench.steps import Steps, measure_steps, print_steps
from pelton.engine.profile import table
from pelton.errors import ConfigError, InternalError, UnsupportedModel
from pelton.formats import checkpoint
from pelton.formats.quants import WeightType
from pelton.models import base
from pelton.ops.data import Batch, KVType, Weight
from tests import tolerances
from tests.models import convert, stepping, tiny
from tests.models.test_parity import LENGTHS, MIXED, sequences, wanted

DENSE = [name for name, (_, own) in tiny.CASES.items() if "experts" not in str(own)]
LENGTH = max(LENGTHS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def loaded(case: str, folder: Path, kind: WeightType = WeightType.F32, **options) -> base.Model:
    path = folder / f"{case}-{kind.name}.gguf"
    if not path.exists():
        convert.write(tiny.build(case), path, lambda name, shape: kind, **options)
    return base.load(checkpoint.open(path))


@cache
def backend(num_threads: int = 2, isa: str | None = None) -> CpuBackend:
    return CpuBackend(BackendConfig(num_threads=num_threads, isa=isa))


def run(model: base.Model, plan, *, kv_type="f32", num_threads=2, isa=None, ids=None) -> list[stepping.Logits]:
    ids = sequences() if ids is None else ids
    spec = stepping.load_spec(model, len(ids), max(map(len, ids)), kv_type=kv_type)
    executor = backend(num_threads, isa).load(spec)
    try:
        return stepping.run(stepping.on_executor(executor), model.config.groups, ids, plan)
    finally:
        executor.close()


@pytest.mark.parametrize("case", DENSE)
def test_logits_equal_transformers(case: str, folder: Path):
    got = run(loaded(case, folder), MIXED)
    for g, w in zip(got, wanted(case), strict=True):
        assert stepping.error(g, w) < tolerances.PARITY_BACKEND


@pytest.mark.parametrize("isa", _core.isas())
def test_every_instruction_set_agrees_with_transformers(isa: str, folder: Path):
    got = run(loaded("gemma3", folder), MIXED, isa=isa)
    for g, w in zip(got, wanted("gemma3"), strict=True):
        assert stepping.error(g, w) < tolerances.PARITY_BACKEND


def alone(length: int, chunk: int) -> list[list[int]]:
    return [[min(chunk, length - start)] for start in range(0, length, chunk)]


@pytest.mark.parametrize("kv_type", get_args(KVType))
@pytest.mark.parametrize(("case", "kind"), [("llama", WeightType.F32), ("gemma3", WeightType.Q8_0)])
def test_the_bits_do_not_depend_on_batch_chunks_or_threads(case: str, kind: WeightType, kv_type: str, folder: Path):
    model = loaded(case, folder, kind)
    whole = run(model, [LENGTHS], kv_type=kv_type)
    for num_threads in (1, 2, 3, 5):
        mixed = run(model, MIXED, kv_type=kv_type, num_threads=num_threads)
        for got, want in zip(mixed, whole, strict=True):
            np.testing.assert_array_equal(got, want)
    for ids, want in zip(sequences(), whole, strict=True):
        for chunk in (1, 5, 37):
            (got,) = run(model, alone(len(ids), chunk), kv_type=kv_type, ids=[ids])
            np.testing.assert_array_equal(got, want)


def test_kernel_families_side_by_side(folder: Path):
    """q, k, v and gate, up in different families: each gets the activations in its own form."""
    path = folder / "mixed.gguf"
    floats = ("attn_k", "ffn_up", "ffn_down")

    def choose(name: str, shape: tuple[int, ...]) -> WeightType:
        return WeightType.F32 if any(part in name for part in floats) else WeightType.Q8_0

    convert.write(tiny.build("llama"), path, choose)
    model = base.load(checkpoint.open(path))
    want = stepping.run(stepping.on_reference(model, len(LENGTHS), LENGTH), model.config.groups, sequences(), [LENGTHS])
    whole, mixed = run(model, [LENGTHS]), run(model, MIXED, num_threads=3)
    for w, a, b in zip(want, whole, mixed, strict=True):
        assert stepping.error(a, w) < tolerances.DEFAULT["int8"]
        np.testing.assert_array_equal(a, b)


def test_logits_in_several_tiles_have_the_same_bits(folder: Path):
    """More logit rows than one tile of the head holds, in another order, some twice."""
    model = loaded("llama", folder)
    ids = sequences()[0]
    (whole,) = run(model, [[len(ids)]], ids=[ids])
    executor = backend().load(stepping.load_spec(model, 1, LENGTH))
    rows = np.random.default_rng(0).integers(0, len(ids), 70).astype(np.int32)

    def run_step(batch):
        return executor.submit(replace(batch, logit_rows=rows)).logits()

    (got,) = stepping.run(run_step, model.config.groups, [ids], [[len(ids)]])
    np.testing.assert_array_equal(got, whole[rows])


def test_padding_of_the_vocabulary_has_no_logits(folder: Path):
    path = folder / "padded.gguf"
    convert.write(tiny.build("llama"), path, padding_rows=13)
    model = base.load(checkpoint.open(path))
    model = replace(model, config=replace(model.config, vocab_size=tiny.VOCAB))
    (got,) = run(model, [[20]], ids=[sequences()[0][:20]])
    assert got.shape == (20, tiny.VOCAB)
    assert got.max() < 9 * 96


@pytest.fixture
def spec(folder: Path) -> Iterator:
    return stepping.load_spec(loaded("llama", folder), 2, 64)


def test_memory_is_planned_exactly(spec):
    plan = backend().plan_memory(spec)
    executor = backend().load(spec)
    tiles = {name: -(-w.shape[0] // 16) * 16 for name, w in spec.weights.items()}  # 16 rows each, or 16 values
    assert plan.weights == sum(
        4 * tiles[name] * (w.shape[1] if len(w.shape) > 1 else 1) for name, w in spec.weights.items()
    )
    layers, heads = 3, 2 * 16
    assert plan.kv_per_block == (layers * 32 * heads * 4 * 2,)
    arena = int(re.search(r"arena (\d+) bytes", executor.dump())[1])
    assert 0 < arena < plan.arena - 2 * (4 << 20)  # beside it: scratch of two threads


def private_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) << 10


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's own account")
def test_memory_is_as_planned_and_given_back():
    """Weights exist once: packed from the file's pages, here stood in for by an array that was there before."""
    width, vocab, room = 2048, 4096, 4 << 20
    values = np.ones((vocab, width), np.float32)
    weight = Weight("embed", WeightType.F32, values.shape, values.reshape(-1).view(np.uint8))

    def record(ops, w, batch):
        return ops.logits(ops.take(ops.embed(w["embed"], batch.ids), batch.logit_rows), w["embed"], num_valid=vocab)

    spec = LoadSpec(record, {"embed": weight}, (), vocab, "f32", (), 512, 4, 64)
    plan = backend().plan_memory(spec)
    before = private_bytes()
    executor = backend().load(spec)
    assert plan.weights <= private_bytes() - before <= plan.weights + room
    ids = np.zeros(512, np.int32)
    executor.submit(Batch(ids, ids, np.array([0, 512], np.int32), (), np.zeros(spec.max_rows, np.int32))).logits()
    assert private_bytes() - before <= plan.weights + plan.arena + room
    executor.close()
    del executor
    assert private_bytes() - before <= room


def test_progress_is_told_and_ends_at_one(spec):
    seen: list[float] = []
    backend().load(spec, seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


def test_fingerprints_tell_apart_what_gives_other_bits(spec, folder: Path):
    first = backend().load(spec).fingerprint("digest")
    assert first == backend(num_threads=1).load(replace(spec, max_tokens=50)).fingerprint("digest")
    model = loaded("llama", folder)
    other_eps = replace(model, config=replace(model.config, norm_eps=2e-5))
    rope = replace(model.config.layers[0].rope, scale=1.5)
    layers = tuple(replace(layer, rope=rope) for layer in model.config.layers)
    other_rope = replace(model, config=replace(model.config, layers=layers))
    changed = [
        replace(spec, kv_type="bf16"),
        replace(spec, record=other_eps.step),
        replace(spec, record=other_rope.step),
    ]
    others = [backend().load(other).fingerprint("digest") for other in changed]
    others.append(backend(isa="generic").load(spec).fingerprint("digest"))
    others.append(backend().load(spec).fingerprint("of another file"))
    assert len({first, *others}) == 6


def test_an_op_without_a_kernel_is_named(folder: Path):
    model = loaded("mixtral", folder)
    with pytest.raises(UnsupportedModel, match=r"no kernel yet for 'route'"):
        backend().load(stepping.load_spec(model, 1, 32))


def test_heads_that_no_thread_has_room_for_are_refused():
    shape = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 1024, "value_dim": 1024, "type": "f32"}
    program = _core.Program(_core.Machine("", 1), [_core.KVCache(**shape, num_blocks=2)], 1 << 20, 0, 1, False)
    rows = [program.add_rows(0, 1024, 1040) for _ in range(4)]
    with pytest.raises(ValueError, match="too many or too wide"):
        program.add_attend(*rows, group=0, slot=0, num_heads=1024, scale=1.0, window=0, softcap=0.0)
    program.add_attend(*rows, group=0, slot=0, num_heads=64, scale=1.0, window=0, softcap=0.0)


def test_a_step_must_be_sampled_before_the_next(spec, folder: Path):
    executor = backend().load(spec)
    pending = []

    def run_step(batch):
        pending.append(executor.submit(batch))
        return np.zeros((batch.logit_rows.size, 1), np.float32)

    stepping.run(run_step, spec.groups, [[1, 2, 3, 4]], [[2], [2]])
    with pytest.raises(InternalError, match="before the next"):
        pending[0].logits()
    assert pending[1].logits().shape == (2, tiny.VOCAB)
    executor.close()
    with pytest.raises(InternalError, match="closed"):
        stepping.run(run_step, spec.groups, [[1, 2, 3, 4]], [[4]])


def test_a_step_beyond_the_limits_is_refused(spec):
    executor = backend().load(replace(spec, max_tokens=3))
    with pytest.raises(InternalError, match="4 tokens"):
        stepping.run(stepping.on_executor(executor), spec.groups, [[1, 2, 3, 4]], [[4]])


def test_an_unknown_instruction_set_is_refused():
    with pytest.raises(ConfigError, match="'z80'"):
        CpuBackend(BackendConfig(num_threads=1, isa="z80"))


def test_profiling_names_the_ops_and_counts_their_work(spec):
    executor = CpuBackend(BackendConfig(num_threads=2, profile=True)).load(spec)
    assert executor.profile() == []
    stepping.run(stepping.on_executor(executor), spec.groups, [[1, 2, 3]], [[2], [1]])
    decode, prompt = executor.profile()
    assert (decode.work, decode.num_steps, prompt.work, prompt.num_steps) == ("decode", 1, "prompt", 1)
    ops = {op.name: (op, next(each for each in prompt.ops if each.name == op.name)) for op in decode.ops}
    num_layers = spec.groups[0].num_layers
    for name, (one, two) in ops.items():  # a step with the third token, and one with the first and the second
        assert one.seconds > 0
        if name.startswith("linear"):
            assert "layers.*." in name
            assert one.num_bytes == two.num_bytes > 0
            assert 2 * one.operations == two.operations > 0
        if name.startswith("attend"):
            assert one.calls == two.calls == num_layers
            assert 2 * one.num_bytes == 3 * two.num_bytes > 0
            assert one.operations == two.operations > 0
    q = next(op for name, (op, _) in ops.items() if "q|k|v" in name)
    shapes = [spec.weights[f"layers.0.{name}"].shape for name in "qkv"]
    assert q.operations == num_layers * sum(2 * rows * columns for rows, columns in shapes)
    assert {"outside the core", "sampling"} <= ops.keys()
    text = table(decode)
    assert text.startswith("decode: 1 steps, ")
    assert all(name in text for name in ops)


def test_without_profiling_there_is_no_profile(spec):
    executor = backend().load(spec)
    stepping.run(stepping.on_executor(executor), spec.groups, [[1, 2, 3]], [[2], [1]])
    assert executor.profile() == []


def test_the_bench_takes_the_steps_of_a_model_apart(tmp_path):
    path = tmp_path / "tiny.gguf"
    convert.write(tiny.build("llama"), path, lambda name, shape: WeightType.Q8_0)
    wanted = Steps(prompt=40, streams=(1, 3), tokens=4)
    told = list(measure_steps(wanted, path, "generic", 2, Limits(read=1e9, int8=1e12, float32=1e12)))
    assert [what for what, _, _ in told] == ["prompt of 40", "1 decoding", "3 decoding"]
    text = io.StringIO()
    for what, profile, results in told:
        assert profile.work == ("prompt" if "prompt" in what else "decode")
        assert profile.num_steps == (1 if "prompt" in what else 3)
        assert [f"{r.op} {r.subject}".strip() for r in results] == [op.name for op in profile.ops]
        assert all(r.share > 0 for r in results if r.op == "linear")
        print_steps(what, profile, results, Console(file=text, width=160))
    assert "layers.*.gate|up Q8_0" in text.getvalue()
    assert "outside" in text.getvalue()
