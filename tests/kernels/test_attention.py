"""Attention over paged memory: against the plain definition, and its bits against themselves."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pytest

from pelton import _core
from pelton.ops.data import BLOCK_TOKENS, Batch, CacheGroup, KVType
from pelton.ops.memory import Memory, round_kv
from pelton.ops.reference import Ops
from pelton.ops.spec import AttendSpec

F32 = npt.NDArray[np.float32]
ISAS = _core.isas()
KV_TYPES: tuple[KVType, ...] = get_args(KVType)


@functools.cache
def machine(isa: str, threads: int) -> _core.Machine:
    return _core.Machine(isa, threads)


@dataclass(frozen=True)
class Layer:
    heads: int = 6
    kv_heads: int = 2
    dim: int = 64
    value_dim: int = 64
    window: int | None = None
    softcap: float | None = None
    kv_type: KVType = "f16"

    @property
    def scale(self) -> float:
        return self.dim**-0.5

    def inputs(self, num_tokens: int, seed: int = 0) -> tuple[F32, F32, F32]:
        """Queries, keys, values of a whole sequence."""
        rng = np.random.default_rng(seed)
        widths = (self.heads * self.dim, self.kv_heads * self.dim, self.kv_heads * self.value_dim)
        q, k, v = (rng.standard_normal((num_tokens, w), np.float32) for w in widths)
        return q * 3, k, v

    def cache(self, num_blocks: int) -> Any:
        return _core.KVCache(
            num_layers=2,
            num_kv_heads=self.kv_heads,
            head_dim=self.dim,
            value_dim=self.value_dim,
            type=self.kv_type,
            num_blocks=num_blocks,
        )

    def attend(
        self, cache: Any, q: F32, k: F32, v: F32, batch: Batch, threads: int = 1, isa: str = "", **place: int
    ) -> F32:
        out = np.full((q.shape[0], self.heads * self.value_dim), np.nan, np.float32)
        _core.attend_alone(
            machine=machine(isa, threads),
            cache=cache,
            **({"slot": 1} | place),
            q=np.ascontiguousarray(q),
            k=np.ascontiguousarray(k),
            v=np.ascontiguousarray(v),
            out=out,
            positions=batch.positions,
            seq_starts=batch.seq_starts,
            tables=batch.tables[0],
            num_heads=self.heads,
            scale=self.scale,
            window=self.window or 0,
            softcap=self.softcap or 0.0,
        )
        return out

    def reference(self, q: F32, k: F32, v: F32, batch: Batch) -> F32:
        group = CacheGroup("full", 1, self.kv_heads, self.dim, self.value_dim)
        memory = Memory([group], [int(batch.tables[0].max()) + 1], self.kv_type, np.float64)
        spec = AttendSpec(
            0,
            0,
            0,
            self.heads,
            self.kv_heads,
            self.dim,
            self.value_dim,
            self.scale,
            "causal",
            self.window,
            self.softcap,
        )
        ops = Ops(batch, memory)
        return ops.attend(q.astype(np.float64), k.astype(np.float64), v.astype(np.float64), spec=spec)


def scattered(lengths: list[int], seed: int = 1) -> npt.NDArray[np.int32]:
    """Block tables over shuffled blocks; ends of short rows point to the null block."""
    counts = [-(-n // BLOCK_TOKENS) for n in lengths]
    blocks = np.random.default_rng(seed).permutation(sum(counts)).astype(np.int32) + 1
    tables = np.zeros((len(lengths), max(counts)), np.int32)
    for row, count in enumerate(counts):
        tables[row, :count], blocks = blocks[:count], blocks[count:]
    return tables


def batch_of(spans: list[tuple[int, int]], tables: npt.NDArray[np.int32]) -> Batch:
    """Each sequence's positions [begin, end)."""
    positions = np.concatenate([np.arange(a, b, dtype=np.int32) for a, b in spans])
    starts = np.cumsum([0] + [b - a for a, b in spans], dtype=np.int32)
    none = np.zeros(0, np.int32)
    return Batch(np.zeros_like(positions), positions, starts, (tables,), none)


def whole(layer: Layer, length: int, threads: int = 1, isa: str = "") -> F32:
    """One prompt in one step."""
    tables = scattered([length])
    cache = layer.cache(int(tables.max()) + 1)
    return layer.attend(cache, *layer.inputs(length), batch_of([(0, length)], tables), threads, isa)


def in_steps(layer: Layer, length: int, sizes: list[int], threads: int = 1) -> F32:
    """The same prompt in steps of these sizes, the last size again and again."""
    tables = scattered([length], seed=2)
    cache = layer.cache(int(tables.max()) + 1)
    q, k, v = layer.inputs(length)
    parts: list[F32] = []
    begin = 0
    while begin < length:
        end = min(length, begin + sizes[min(len(parts), len(sizes) - 1)])
        rows = slice(begin, end)
        parts.append(layer.attend(cache, q[rows], k[rows], v[rows], batch_of([(begin, end)], tables), threads))
        begin = end
    return np.concatenate(parts)


LAYERS = [
    Layer(),
    Layer(kv_type="f32"),
    Layer(kv_type="bf16"),
    Layer(kv_type="int8"),
    Layer(heads=1, kv_heads=1, dim=80, value_dim=80),
    Layer(heads=14, kv_heads=2, window=37),
    Layer(heads=4, kv_heads=4, dim=96, value_dim=96, softcap=20.0),
    Layer(heads=4, kv_heads=1, dim=256, value_dim=256, window=300, softcap=50.0),
    Layer(heads=8, kv_heads=2, dim=128, value_dim=128, window=1),
    Layer(heads=3, kv_heads=1, dim=72, value_dim=40, kv_type="f32", window=256),
    Layer(heads=3, kv_heads=1, dim=72, value_dim=40, kv_type="bf16", window=256),
    Layer(heads=3, kv_heads=1, dim=72, value_dim=40, kv_type="int8", window=256),
    Layer(heads=20, kv_heads=2, dim=128, value_dim=96, kv_type="int8"),
]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_equals_the_definition(layer: Layer, isa: str) -> None:
    spans = [(0, 300), (0, 1), (0, 45)]
    tables = scattered([b for _, b in spans])
    batch = batch_of(spans, tables)
    q, k, v = layer.inputs(346)
    out = layer.attend(layer.cache(int(tables.max()) + 1), q, k, v, batch, 2, isa)
    expected = layer.reference(q, k, v, batch)
    np.testing.assert_allclose(out, expected, rtol=0, atol=3e-6 * np.abs(expected).max())


@pytest.mark.parametrize("layer", [LAYERS[0], LAYERS[3], LAYERS[9]], ids=str)
def test_long_context_equals_the_definition(layer: Layer) -> None:
    length = 800
    expected = layer.reference(*layer.inputs(length), batch_of([(0, length)], scattered([length])))
    np.testing.assert_allclose(whole(layer, length, 2), expected, rtol=0, atol=3e-6 * np.abs(expected).max())


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_chunks_and_decode_give_the_same_bits(layer: Layer) -> None:
    length = 600
    expected = whole(layer, length)
    for sizes in [[5], [37], [256], [100, 1], [511, 88, 1]]:
        assert np.array_equal(in_steps(layer, length, sizes), expected), sizes


@pytest.mark.parametrize("threads", [2, 3, 5, 16])
@pytest.mark.parametrize("layer", [LAYERS[0], LAYERS[3], LAYERS[7]], ids=str)
def test_threads_give_the_same_bits(layer: Layer, threads: int) -> None:
    length = 1100
    expected = whole(layer, length)
    assert np.array_equal(whole(layer, length, threads), expected)
    # A single stream that decodes: its pieces go to several threads.
    assert np.array_equal(in_steps(layer, length, [length - 2, 1], threads), expected)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_a_batch_gives_the_same_bits_as_each_alone(isa: str, kv_type: KVType) -> None:
    layer = Layer(window=None, kv_type=kv_type)
    spans = [(520, 521), (0, 70), (299, 300), (64, 128), (31, 33), (255, 258)]
    tables = scattered([b for _, b in spans])
    cache = layer.cache(int(tables.max()) + 1)
    whole_inputs = [layer.inputs(b, seed=s) for s, (_, b) in enumerate(spans)]
    for s, (begin, _) in enumerate(spans):
        if begin:
            earlier = (x[:begin] for x in whole_inputs[s])
            layer.attend(cache, *earlier, batch_of([(0, begin)], tables[s : s + 1]), 1, isa)
    step = [np.concatenate([x[i][a:b] for x, (a, b) in zip(whole_inputs, spans, strict=True)]) for i in range(3)]
    together = layer.attend(cache, *step, batch_of(spans, tables), 3, isa)
    begin = 0
    for s, (a, b) in enumerate(spans):
        alone = layer.attend(cache, *(x[a:b] for x in whole_inputs[s]), batch_of([(a, b)], tables[s : s + 1]), 1, isa)
        assert np.array_equal(together[begin : begin + b - a], alone), s
        begin += b - a


def test_blocks_past_the_window_may_be_given_back() -> None:
    layer = Layer(window=40)
    length = 700
    expected = whole(layer, length)
    tables = scattered([length])
    cache = layer.cache(int(tables.max()) + 1)
    q, k, v = layer.inputs(length)
    for begin in range(0, length, 50):
        rows = slice(begin, begin + 50)
        tables[0, : max(0, begin - 39) // BLOCK_TOKENS] = 0
        out = layer.attend(cache, q[rows], k[rows], v[rows], batch_of([(begin, begin + 50)], tables))
        assert np.array_equal(out, expected[rows])


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_what_another_sequence_left_in_a_block_is_not_seen(kv_type: KVType) -> None:
    layer = Layer(kv_type=kv_type)
    tables = scattered([45])
    q, k, v = layer.inputs(45)
    clean = layer.attend(layer.cache(3), q, k, v, batch_of([(0, 45)], tables))
    cache = layer.cache(3)
    bad = np.resize(np.array([np.nan, np.inf, -np.inf, 3e38, -1e30], np.float32), (64, k.shape[1]))
    layer.attend(cache, np.resize(q, (64, q.shape[1])), bad, bad, batch_of([(0, 64)], scattered([64], seed=3)))
    assert np.array_equal(layer.attend(cache, q, k, v, batch_of([(0, 45)], tables)), clean)


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_blocks_can_be_moved(kv_type: KVType) -> None:
    layer = Layer(dim=80, value_dim=48, kv_type=kv_type)
    length = 90
    q, k, v = layer.inputs(length)
    tables = np.array([[1, 2, 3]], np.int32)
    cache = layer.cache(8)
    expected = layer.attend(cache, q, k, v, batch_of([(0, length)], tables))
    cache.copy(src=1, dst=6)
    data = cache.read(tables[0, 1:])
    assert len(data) == 2 * cache.block_bytes
    cache.write(np.array([7, 4], np.int32), data)
    moved = np.array([[6, 7, 4]], np.int32)
    last = slice(length - 1, length)
    out = layer.attend(cache, q[last], k[last], v[last], batch_of([(length - 1, length)], moved))
    assert np.array_equal(out, expected[last])
    with pytest.raises(ValueError, match="not of that many blocks"):
        cache.write(tables[0], data)


def awkward() -> F32:
    """Numbers around everything where rounding and range change, of both signs; [tokens, 64]."""
    rng = np.random.default_rng(5)
    half = rng.integers(0, 0x7C00, 2000).astype(np.uint16).view(np.float16).astype(np.float32)
    beside = half + np.float32(0.5) * (np.nextafter(half.astype(np.float16), np.float16(np.inf)) - half)
    powers = np.float32(2.0) ** np.arange(-149, 127, dtype=np.float32)
    edges = np.array([0, 65503.9, 65519.9, 65520, 1e30, 3.4e38, np.inf, np.nan, 2**-25, 2**-25 + 2**-40], np.float32)
    near = np.nextafter(beside, np.float32(np.inf)), np.nextafter(beside, np.float32(0))
    values = np.concatenate([half, beside, *near, powers, powers * np.float32(1.0005), edges])
    signed = np.stack([values, -values], axis=1).reshape(-1)
    return np.resize(signed, (-(-signed.size // 64), 64))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_what_is_stored_is_what_the_definition_rounds_to(isa: str, kv_type: KVType) -> None:
    """Each token sees itself alone, so that its value comes out as it is stored, bit for bit."""
    layer = Layer(heads=1, kv_heads=1, window=1, kv_type=kv_type)
    values = awkward()
    length = len(values)
    tables = scattered([length])
    zeros = np.zeros_like(values)
    work = zeros, zeros, values, batch_of([(0, length)], tables)
    got = layer.attend(layer.cache(int(tables.max()) + 1), *work, 1, isa)
    assert np.array_equal(got, round_kv(values, kv_type) + np.float32(0))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_every_set_of_instructions_stores_the_same_bytes(isa: str, kv_type: KVType) -> None:
    layer = Layer(heads=1, kv_heads=1, kv_type=kv_type)
    keys = awkward()
    tables = scattered([len(keys)])
    work = np.zeros_like(keys), keys, keys[::-1], batch_of([(0, len(keys))], tables)
    caches = [layer.cache(int(tables.max()) + 1) for _ in range(2)]
    for cache, each in zip(caches, (isa, "generic"), strict=True):
        layer.attend(cache, *work, 1, each)
    assert caches[0].read(tables[0]) == caches[1].read(tables[0])


def test_repeats_go_on_in_the_next_layers() -> None:
    layer = Layer()
    tables = scattered([45])
    work = *layer.inputs(45), batch_of([(0, 45)], tables)
    repeated, by_hand = layer.cache(3), layer.cache(3)
    out = layer.attend(repeated, *work, slot=1, repeat=2)
    assert np.array_equal(layer.attend(by_hand, *work, slot=1), out)
    assert repeated.read(tables[0]) != by_hand.read(tables[0])
    layer.attend(by_hand, *work, slot=0)
    assert repeated.read(tables[0]) == by_hand.read(tables[0])


def test_sets_of_instructions_that_fuse_agree() -> None:
    wide = [isa for isa in ISAS if isa != "generic"]
    for layer in LAYERS[:4]:
        for isa in wide[1:]:
            assert np.array_equal(whole(layer, 300, isa=isa), whole(layer, 300, isa=wide[0]))


@pytest.mark.parametrize(("kv_type", "bytes_per_token"), [("f32", 480), ("bf16", 240), ("f16", 240), ("int8", 140)])
def test_a_block_takes_what_its_type_says(kv_type: KVType, bytes_per_token: int) -> None:
    """Keys of 72 columns and values of 40, which take 48; for int8 also three scales and two."""
    layer = Layer(kv_heads=2, dim=72, value_dim=40, kv_type=kv_type)
    assert layer.cache(1).block_bytes == 2 * 2 * BLOCK_TOKENS * bytes_per_token
