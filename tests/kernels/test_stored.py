"""Packed weights from the cache folder: the bits of fresh ones, or none at all."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from pelton import _core
from pelton.backends.cpu import packing
from pelton.backends.cpu.stored import StoredWeights
from pelton.formats import bounded_folder
from pelton.formats.bounded_folder import BoundedFolder
from pelton.formats.quants import WeightType, quantize
from pelton.ops.data import Weight

DIGEST = "d" * 64
CHUNK = _core.STORED_CHUNK


def test_a_checksum_changes_with_any_change():
    data = np.random.default_rng(0).integers(0, 256, 1000, np.uint8)
    seen = {_core.checksum(data[:size]) for size in range(1001)}
    assert len(seen) == 1001
    for bit in range(0, 8000, 7):
        changed = data.copy()
        changed[bit // 8] ^= 1 << bit % 8
        seen.add(_core.checksum(changed))
    assert len(seen) == 1001 + len(range(0, 8000, 7))


def test_a_checksum_tells_the_order_and_pairs_of_high_bits():
    data = np.zeros(4096, np.uint8)
    data[63] = 1
    seen = {_core.checksum(data), _core.checksum(np.roll(data, 64)), _core.checksum(np.roll(data, 1))}
    for at in range(127, 4096, 64):  # the highest bits of two words of one lane
        pair = np.zeros(4096, np.uint8)
        pair[[63, at]] = 0x80
        seen.add(_core.checksum(pair))
    assert len(seen) == 3 + len(range(127, 4096, 64))


@pytest.fixture(scope="module")
def machine() -> _core.Machine:
    return _core.Machine("", 2)


def some_weights() -> dict[str, Weight]:
    rng = np.random.default_rng(1)
    order = rng.permutation(640).astype(np.int32)
    weights = {}
    for name, kind, rows, row_order in [
        ("q", WeightType.Q8_0, 640, order),
        ("down", WeightType.Q4_K, 1999, None),
        ("up", WeightType.F32, 640, None),
    ]:
        data = quantize(kind, rng.standard_normal((rows, 1024)).astype(np.float32)).reshape(-1)
        weights[name] = Weight(name, kind, (rows, 1024), data, row_order)
    norm = rng.standard_normal(1024).astype(np.float32)
    return weights | {"norm": Weight("norm", WeightType.F32, (1024,), norm.view(np.uint8))}


class Kept:
    """Some weights, packed, and kept in a folder."""

    def __init__(self, home: Path, machine: _core.Machine) -> None:
        self.weights = some_weights()
        self.layout = packing.lay_out(self.weights, self.weights, machine)
        self.memory = packing.pack(self.layout, self.weights, machine, None)
        self.folder = BoundedFolder(str(home), 10**9)
        self.stored = StoredWeights(
            self.folder, packing.layout_key(self.layout, self.weights, machine), self.layout.bytes
        )
        assert self.stored.write(DIGEST, self.memory, lambda: True)
        (self.path,) = home.iterdir()


@pytest.fixture
def kept(tmp_path: Path, machine: _core.Machine, monkeypatch: pytest.MonkeyPatch) -> Kept:
    monkeypatch.setattr(bounded_folder, "SPARE_DISK", 0)
    return Kept(tmp_path, machine)


def view(memory: _core.Memory) -> np.ndarray:
    return memory.view(0, memory.size)


def test_what_is_read_is_what_was_packed(kept: Kept, machine: _core.Machine):
    assert kept.layout.bytes > 2 * CHUNK
    assert kept.layout.bytes % CHUNK
    shares: list[float] = []
    memory = kept.stored.read(DIGEST, machine, shares.append)
    assert memory is not None
    np.testing.assert_array_equal(view(memory), view(kept.memory))
    assert shares[-1] == 1.0
    assert not kept.stored.write(DIGEST, kept.memory, lambda: True), "it is there already"
    assert kept.stored.read("e" * 64, machine, None) is None


def is_refused(kept: Kept, machine: _core.Machine) -> bool:
    """Is the file as it is now not used, and removed?"""
    return kept.stored.read(DIGEST, machine, None) is None and not kept.path.exists()


def test_a_damaged_file_is_never_used(kept: Kept, machine: _core.Machine):
    whole = kept.path.read_bytes()
    places = [0, 8, 12, 16, 24, 32, 63, 64, 95, 96, 103, 119, 4095, 4096, 4096 + CHUNK, len(whole) - 1]
    places += random.Random(2).sample(range(len(whole)), 24)
    for at in places:
        kept.path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        assert is_refused(kept, machine), at


def test_a_file_of_another_length_is_never_used(kept: Kept, machine: _core.Machine):
    whole = kept.path.read_bytes()
    for size in (0, 50, 96, 4096, 5000, 4096 + CHUNK, len(whole) - 1):
        kept.path.write_bytes(whole[:size])
        assert is_refused(kept, machine), size
    kept.path.write_bytes(whole + b"\0")
    assert is_refused(kept, machine)


def test_a_block_of_zeros_or_of_another_place_is_noticed(kept: Kept, machine: _core.Machine):
    whole = kept.path.read_bytes()
    for block in (bytes(4096), whole[20480:24576]):
        kept.path.write_bytes(whole[:8192] + block + whole[12288:])
        assert is_refused(kept, machine)


def test_the_key_tells_layouts_apart_and_shares_what_is_alike(kept: Kept, machine: _core.Machine):
    def key(weights: dict[str, Weight], isa: str = "") -> bytes:
        other = _core.Machine(isa, 1)
        return packing.layout_key(packing.lay_out(weights, weights, other), weights, other)

    weights = kept.weights
    same = key(weights)
    for isa in set(_core.isas()) - {"amx"}:
        assert key(weights, isa) == key(weights, "generic")
        layout = packing.lay_out(weights, weights, _core.Machine(isa, 1))
        memory = packing.pack(layout, weights, _core.Machine(isa, 1), None)
        if key(weights, isa) == same:
            np.testing.assert_array_equal(view(memory), view(kept.memory))
    q = weights["q"]
    assert q.row_order is not None
    flipped = Weight("q", q.type, q.shape, q.data, q.row_order[::-1].copy())
    others = [weights | {"q": flipped}, dict(reversed(weights.items())), {k: weights[k] for k in ("q", "down")}]
    assert len({same, *map(key, others)}) == 4


def test_a_writer_that_is_stopped_leaves_nothing(tmp_path: Path, machine: _core.Machine, kept: Kept):
    kept.path.unlink()
    calls = iter([True, True, False])
    assert not kept.stored.write(DIGEST, kept.memory, lambda: next(calls))
    assert list(tmp_path.iterdir()) == []
