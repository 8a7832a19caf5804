"""Weight types against the `gguf` package, which holds llama.cpp's own definitions."""

import gguf
import numpy as np
import pytest

from pelton.errors import UnsupportedModel
from pelton.formats import iq4, quants
from pelton.formats.quants import WeightType

SUPPORTED = [t for t in WeightType if quants.is_supported(t)]
K_QUANTS = [WeightType.Q2_K, WeightType.Q3_K, WeightType.Q4_K, WeightType.Q5_K, WeightType.Q6_K]
IQ4 = [WeightType.IQ4_NL, WeightType.IQ4_XS]

# Relative RMS error of normally distributed weights after a round trip: what so many bits can give.
ROUND_TRIP = {
    WeightType.F32: 0.0,
    WeightType.F16: 3e-4,
    WeightType.BF16: 2e-3,
    WeightType.Q8_0: 0.007,
    WeightType.Q6_K: 0.025,
    WeightType.Q5_0: 0.06,
    WeightType.Q5_1: 0.05,
    WeightType.Q5_K: 0.05,
    WeightType.Q4_0: 0.11,
    WeightType.Q4_1: 0.10,
    WeightType.Q4_K: 0.10,
    WeightType.IQ4_NL: 0.10,
    WeightType.IQ4_XS: 0.10,
    WeightType.Q3_K: 0.25,
    WeightType.Q2_K: 0.45,
}


def oracle(weight_type: WeightType) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType(int(weight_type))


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal bit for bit, any NaN standing for any other."""
    nan = np.isnan(a) & np.isnan(b)
    return a.shape == b.shape and bool(np.all(nan | (a.view(np.uint32) == b.view(np.uint32))))


def normal(rows: int, columns: int) -> np.ndarray:
    return np.random.default_rng(rows * columns).standard_normal((rows, columns)).astype(np.float32)


@pytest.mark.parametrize("weight_type", WeightType)
def test_ids_and_sizes_are_ggmls(weight_type):
    block, size = gguf.GGML_QUANT_SIZES[oracle(weight_type)]
    assert oracle(weight_type).name == weight_type.name
    assert (quants.block_size(weight_type), quants.block_bytes(weight_type)) == (block, size)
    assert quants.row_bytes(weight_type, 3 * block) == 3 * size


@pytest.mark.parametrize("weight_type", SUPPORTED)
def test_dequantize_of_any_bytes_is_bit_exact(weight_type):
    rng = np.random.default_rng(1)
    data = rng.integers(0, 256, (37, 4 * quants.block_bytes(weight_type)), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(data, oracle(weight_type))
    ours = quants.dequantize(weight_type, data)
    assert ours.dtype == np.float32
    assert same_bits(ours, expected)


@pytest.mark.parametrize("weight_type", [t for t in SUPPORTED if t not in [*K_QUANTS, *IQ4]])
@pytest.mark.parametrize("scale", [1e-30, 0.02, 1.0, 1000.0])
def test_quantize_is_bit_exact(weight_type, scale):
    x = normal(19, 128) * np.float32(scale)
    x[3] = 0
    x[4, :40] = 0.5  # constant blocks
    expected = gguf.quantize(x, oracle(weight_type)).view(np.uint8)
    assert np.array_equal(quants.quantize(weight_type, x), expected)


@pytest.mark.parametrize("weight_type", SUPPORTED)
def test_round_trip_error(weight_type):
    x = normal(16, 1024) * np.float32(0.02)
    y = quants.dequantize(weight_type, quants.quantize(weight_type, x))
    error = float(np.sqrt(np.mean((x - y) ** 2) / np.mean(x**2)))
    assert error <= ROUND_TRIP[weight_type]


@pytest.mark.parametrize("weight_type", K_QUANTS)
@pytest.mark.parametrize("value", [0.0, 0.25, -0.25])
def test_constant_k_blocks_survive(weight_type, value):
    x = np.full((1, 256), value, np.float32)
    y = quants.dequantize(weight_type, quants.quantize(weight_type, x))
    np.testing.assert_allclose(y, x, rtol=0.01)


@pytest.mark.parametrize("weight_type", IQ4)
def test_values_of_the_table_survive(weight_type):
    """Every entry of the table times any scale, of either sign, and blocks of zeros."""
    x = np.tile(iq4.VALUES, 32).reshape(2, 256) * np.float32(0.5)
    x[1] *= -1
    x[1, 96:128] = 0
    np.testing.assert_array_equal(quants.dequantize(weight_type, quants.quantize(weight_type, x)), x)


@pytest.mark.parametrize("weight_type", SUPPORTED)
def test_reads_slices_that_are_not_contiguous(weight_type):
    data = quants.quantize(weight_type, normal(8, 256))
    whole = quants.dequantize(weight_type, data)
    assert same_bits(quants.dequantize(weight_type, data[::2]), whole[::2])


def test_bf16_rounds_to_nearest_even_and_keeps_nan():
    x = np.array([1.0, 1.00390625, 1.01171875, np.inf, -np.inf, 3.4e38], np.float32)
    assert quants.f32_to_bf16(x).tolist() == [0x3F80, 0x3F80, 0x3F82, 0x7F80, 0xFF80, 0x7F80]
    signalling = np.array([0x7F800001], np.uint32).view(np.float32)
    assert np.isnan(quants.bf16_to_f32(quants.f32_to_bf16(signalling)))[0]


def test_a_type_without_codec_says_so():
    data = np.zeros((1, quants.row_bytes(WeightType.I8, 32)), np.uint8)
    with pytest.raises(UnsupportedModel, match="I8"):
        quants.dequantize(WeightType.I8, data)
    with pytest.raises(UnsupportedModel, match="I32"):
        quants.quantize(WeightType.I32, np.zeros((1, 32)))


def test_a_row_that_is_no_multiple_of_the_block_is_refused():
    with pytest.raises(ValueError, match="Q4_K"):
        quants.row_bytes(WeightType.Q4_K, 64)
