"""Linear kernels: every weight type, on every instruction set that this machine has, against the NumPy twin."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest

from pelton import _core
from pelton.formats import quants
from pelton.formats.quants import WeightType
from pelton.ops import numerics

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

FLOATS = [WeightType.F32, WeightType.F16, WeightType.BF16]
LEGACY = [WeightType.Q4_0, WeightType.Q4_1, WeightType.Q5_0, WeightType.Q5_1, WeightType.Q8_0]
KQUANTS = [WeightType.Q2_K, WeightType.Q3_K, WeightType.Q4_K, WeightType.Q5_K, WeightType.Q6_K]
INT8 = [*LEGACY, *KQUANTS, WeightType.IQ4_NL, WeightType.IQ4_XS]
TWINS = {**dict.fromkeys(FLOATS, numerics.linear_float32), **dict.fromkeys(INT8, numerics.linear_int8)}
ISAS = [
    pytest.param(isa, marks=pytest.mark.skipif(isa not in _core.isas(), reason=f"this CPU does not have {isa}"))
    for isa in ("generic", "avx2", "avx512", "amx")
]
ROWS = [1, 2, 3, 5, 8, 17, 64, 150]

every_kernel = pytest.mark.parametrize("isa", ISAS)
every_type = pytest.mark.parametrize("type", [*FLOATS, *INT8], ids=lambda t: t.name)


def shapes(type: WeightType) -> list[tuple[int, int]]:
    """(N, K): whole tiles; a tail of rows; for blocks of 32 also a number of blocks that is no multiple of 8."""
    if quants.block_size(type) == 256:
        return [(32, 256), (37, 512), (16, 2560)]
    return [(32, 256), (37, 13 * 32), (16, 2464)]


def is_bf16(isa: str, type: WeightType) -> bool:
    return isa == "amx" and type is not WeightType.F32


def twin(isa: str, type: WeightType, rows: U8, x: F32) -> F32:
    return (numerics.linear_bf16 if is_bf16(isa, type) else TWINS[type])(type, rows, x)


def random_rows(type: WeightType, N: int, K: int, seed: int) -> U8:
    values = np.random.default_rng(seed).standard_normal((N, K)).astype(np.float32)
    return quants.quantize(type, 0.05 * values)


def random_inputs(M: int, K: int, seed: int) -> F32:
    rng = np.random.default_rng(seed)
    outliers = np.where(rng.random(K) < 0.02, 30, 1)
    return (rng.standard_normal((M, K)) * outliers).astype(np.float32)


class Kernel:
    """One kernel on one weight."""

    def __init__(self, isa: str, type: WeightType, rows: U8, K: int) -> None:
        self.core = _core.LinearKernel(isa, type)
        self.N, self.K = len(rows), K
        self.tiles = self.core.pack(rows, K)
        self.num_tiles = (self.N + 15) // 16

    def run(self, x: F32, splits: tuple[int, ...] = ()) -> F32:
        out = np.full((len(x), 16 * self.num_tiles), np.float32(1e30))
        act = self.core.prepare(x)
        bounds = (0, *splits, self.num_tiles)
        for t0, t1 in pairwise(bounds):
            self.core.run(self.tiles, act, self.K, out, t0, t1)
        return out[:, : self.N]


def assert_same_bits(actual: F32, expected: F32) -> None:
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(np.signbit(actual[~np.isnan(actual)]), np.signbit(expected[~np.isnan(expected)]))


@every_kernel
@every_type
def test_matches_the_twin(isa: str, type: WeightType) -> None:
    for N, K in shapes(type):
        rows, x = random_rows(type, N, K, 1), random_inputs(7, K, 2)
        assert_same_bits(Kernel(isa, type, rows, K).run(x), twin(isa, type, rows, x))


@every_kernel
@every_type
def test_number_of_rows_and_split_do_not_show(isa: str, type: WeightType) -> None:
    N, K = 69, shapes(type)[1][1]
    kernel = Kernel(isa, type, random_rows(type, N, K, 3), K)
    x = random_inputs(max(ROWS), K, 4)
    alone = np.concatenate([kernel.run(x[m : m + 1]) for m in range(len(x))])
    for M in ROWS:
        assert_same_bits(kernel.run(x[:M]), alone[:M])
        assert_same_bits(kernel.run(x[:M], splits=(1, 3)), alone[:M])


@every_kernel
@every_type
def test_sums_over_long_rows_are_kept_between_chunks_of_columns(isa: str, type: WeightType) -> None:
    K = 9728
    rows, x = random_rows(type, 16, K, 5), random_inputs(130, K, 6)
    kernel = Kernel(isa, type, rows, K)
    many = kernel.run(x)
    for m in (0, 63, 129):
        assert_same_bits(many[m : m + 1], kernel.run(x[m : m + 1]))


@every_kernel
@every_type
def test_rows_come_back_out_of_tiles(isa: str, type: WeightType) -> None:
    for N, K in shapes(type):
        rows = random_rows(type, N, K, 7)
        kernel = Kernel(isa, type, rows, K)
        expected = numerics.bf16_values(type, rows) if is_bf16(isa, type) else quants.dequantize(type, rows)
        for n in (0, 15, N - 1):
            np.testing.assert_array_equal(kernel.core.unpack_row(kernel.tiles, n, K), expected[n])


@every_kernel
@pytest.mark.parametrize("type", INT8, ids=lambda t: t.name)
@pytest.mark.parametrize("byte", [0x00, 0xFF, 0x7F, 0x80, 0x0F, 0xF0])
def test_extreme_weights(isa: str, type: WeightType, byte: int) -> None:
    """Every quant at a limit, against activations at a limit: nothing saturates."""
    N, K = 16, 512
    blocks = quants.as_blocks(type, np.full((N, quants.row_bytes(type, K)), byte, np.uint8)).copy()
    for name in {"d", "dmin", "m"} & set(blocks.dtype.names or ()):
        blocks[name] = 0.75
    rows = blocks.view(np.uint8).reshape(N, -1)
    signs = np.random.default_rng(8).choice(np.float32([-1, 1]), (6, K))
    x = np.concatenate([np.ones((1, K), np.float32), -np.ones((1, K), np.float32), signs])
    assert_same_bits(Kernel(isa, type, rows, K).run(x), twin(isa, type, rows, x))


@every_kernel
@every_type
def test_random_bytes_as_weights(isa: str, type: WeightType) -> None:
    """Any bytes are a weight: scales may be infinite, NaN or subnormal, and nothing else may differ."""
    N, K = 32, 1024
    rows = np.random.default_rng(9).integers(0, 256, (N, quants.row_bytes(type, K)), np.uint8)
    x = random_inputs(6, K, 10)
    assert_same_bits(Kernel(isa, type, rows, K).run(x), twin(isa, type, rows, x))


@every_kernel
@pytest.mark.parametrize("type", INT8, ids=lambda t: t.name)
def test_blocks_of_very_small_scales_are_not_lost_beside_large_ones(isa: str, type: WeightType) -> None:
    """One block of a row is 2**20 times the others, and its activations are zero."""
    N, K, block = 16, 1024, quants.block_size(type)
    values = np.random.default_rng(15).standard_normal((N, K)).astype(np.float32) * np.float32(2.0**-6)
    values[:, block : 2 * block] *= np.float32(2.0**20)
    rows, x = quants.quantize(type, values), random_inputs(3, K, 16)
    x[:, block : 2 * block] = 0
    out = Kernel(isa, type, rows, K).run(x)
    assert_same_bits(out, twin(isa, type, rows, x))
    expected = x.astype(np.float64) @ values.astype(np.float64).T
    assert np.abs(out - expected).max() < 0.7 * np.abs(expected).max()


@every_kernel
@pytest.mark.parametrize("type", INT8, ids=lambda t: t.name)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_spoils_its_own_row_alone(isa: str, type: WeightType, bad: float) -> None:
    N, K = 16, 512
    rows, x = random_rows(type, N, K, 11), random_inputs(6, K, 12)
    clean = Kernel(isa, type, rows, K).run(x)
    x[3, 100] = bad
    out = Kernel(isa, type, rows, K).run(x)
    assert not np.isfinite(out[3]).any()
    assert_same_bits(np.delete(out, 3, axis=0), np.delete(clean, 3, axis=0))


@every_kernel
@pytest.mark.parametrize("type", INT8, ids=lambda t: t.name)
def test_zeros_and_tiny_and_huge_activations(isa: str, type: WeightType) -> None:
    N, K = 16, 512
    rows, x = random_rows(type, N, K, 13), random_inputs(6, K, 14)
    x[0] = 0
    x[1, :64] = 0
    x[2] *= np.float32(2.0**-110)
    x[3] *= np.float32(1e36)
    x[4, 32:64] = np.float32(1e-42)
    out = Kernel(isa, type, rows, K).run(x)
    assert_same_bits(out, twin(isa, type, rows, x))
    assert (out[0] == 0).all()


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(ValueError, match="weight type 99"):
        _core.LinearKernel("generic", 99)
    with pytest.raises(ValueError, match="instruction set x87"):
        _core.LinearKernel("x87", WeightType.F32)
