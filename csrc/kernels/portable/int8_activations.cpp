// Rounding activations to int8, 32 columns at a time.
#include "kernels/portable/int8_activations.h"

#include "kernels/portable/linear.h"

namespace pelton::PELTON_ISA {
namespace {

// Bits of the largest magnitude. As integers NaN and infinity are the largest of all, wherever they stand.
int32_t largest_bits(const float* x) {
    int32_t largest = 0;
    for (int i = 0; i < kBlock; i++) {
        const int32_t bits = load_as<int32_t>(x + i) & 0x7fffffff;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

constexpr float kSmallest = 0x1p-100f;  // below it 127 / largest would overflow: such a block counts as zeros
constexpr float kRound = 0x1.8p23f;     // adding it leaves |x| < 2^22, rounded to nearest even, in the low bits
constexpr int32_t kRoundBits = 0x4b400000;

void quantize(const float* x, int8_t* values, BlockInfo* info) {
    const int32_t bits = largest_bits(x);
    const float largest = __builtin_bit_cast(float, bits);
    const bool is_finite = bits < 0x7f800000;
    if (!is_finite || largest < kSmallest) {
        const float scale = is_finite ? 0.0f : __builtin_nanf("");
        __builtin_memset(values, 0, kBlock);
        *info = {scale, scale, 0, {0, 0}};
        return;
    }
    const float inverse = 127.0f / largest;
    int32_t rounded[kBlock];
    for (int i = 0; i < kBlock; i++) {
        const float shifted = x[i] * inverse + kRound;
        rounded[i] = load_as<int32_t>(&shifted) - kRoundBits;
    }
    int32_t sums[2] = {0, 0};
    for (int i = 0; i < kBlock / 2; i++) {
        sums[0] += rounded[i];
        sums[1] += rounded[i + kBlock / 2];
    }
    for (int i = 0; i < kBlock; i++) values[i] = (int8_t)rounded[i];
    const float scale = largest / 127.0f;
    const int32_t sum = sums[0] + sums[1];
    *info = {scale, scale * (float)sum, -8 * sum, {(int16_t)sums[0], (int16_t)sums[1]}};
}

}  // namespace

size_t int8_bytes(int M, int K) { return (size_t)M * (size_t)(K / kBlock) * kRowBlockBytes; }

void int8_prepare(const float* x, size_t ldx, int m0, int m1, int M, int K, uint8_t* act) {
    const Activations out{act, M, K / kBlock};
    for (int m = m0; m < m1; m++) {
        const int row = m % kPanelRows;
        for (int b = 0; b < out.num_blocks; b++) {
            const ActivationBlock block = out.block(m / kPanelRows, b);
            quantize(x + (size_t)m * ldx + (size_t)b * kBlock, const_cast<int8_t*>(block.values) + row * kBlock,
                     const_cast<BlockInfo*>(block.info) + row);
        }
    }
}

}  // namespace pelton::PELTON_ISA
