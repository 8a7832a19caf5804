// The BFloat16 family's definition (csrc/kernels/amx/weights.h, tiles.h), plainly and one number at a time.
#include "tiles.h"

#include <algorithm>

#define PELTON_ISA selftest_blocks
#include "kernels/portable/file_blocks.h"

namespace selftest {

using namespace pelton;
using namespace pelton::selftest_blocks;

namespace {

// The unit in the last place of a number with `bits` after the first, its exponent at least that of binary16.
double unit(double value, int bits) {
    return std::ldexp(1.0, std::max(value == 0 ? -14 : std::ilogb(value), -14) - bits);
}

// The nearest binary16 number, ties to even.
float to_half(double value) { return static_cast<float>(std::nearbyint(value / unit(value, 10)) * unit(value, 10)); }

float flush(float value) { return std::fabs(value) < 0x1p-126f ? std::copysign(0.0f, value) : value; }

float to_bf16(float value) {
    if (std::isnan(value)) return value;
    uint32_t bits = __builtin_bit_cast(uint32_t, flush(value));
    bits += 0x7fff + (bits >> 16 & 1);
    return __builtin_bit_cast(float, bits & 0xffff0000u);
}

// A binary16 number as bf16, 2^112 times smaller: halves away from zero.
float to_operand(float half) {
    return flush(static_cast<float>(std::round(half / unit(half, 7)) * unit(half, 7) * 0x1p-112));
}

// Brings binary16 numbers of a row to where the largest that can come of them is in [2^14, 2^15).
class Scaling {
  public:
    void meet(uint16_t half, float reach) { meet_sum({half}, {reach}); }
    void meet_sum(std::initializer_list<uint16_t> halves, std::initializer_list<float> reaches) {
        float sum = 0;
        auto reach = reaches.begin();
        for (const uint16_t half : halves) {
            sum += std::fabs(number(half)) * *reach++;
            is_finite_ &= std::isfinite(half_to_float(half));
        }
        largest_ = std::max(largest_, sum);
    }
    int exponent() const { return largest_ > 0 ? 14 - std::ilogb(largest_) : 0; }
    float half(uint16_t half) const { return to_half(std::ldexp(number(half), exponent())); }
    float scale() const { return is_finite_ ? std::ldexp(1.0f, 64 - exponent()) : NAN; }

  private:
    static float number(uint16_t half) {
        const float value = half_to_float(half);
        return std::isfinite(value) ? value : 0;
    }
    float largest_ = 0;
    bool is_finite_ = true;
};

template <class File>
constexpr bool has_minimum = requires { File::kMinimum; };
template <class File>
constexpr bool has_table = requires { File::kTable; };
template <class File>
constexpr bool has_integers = requires { File::kScales; };

// kBits of a code; the largest scale of a K-quant, 1 for legacy types.
template <class File, int kBits, int kLargestScale = 1>
TileRow block_row(const uint8_t* row, int K) {
    constexpr int kOffset = [] {
        if constexpr (has_minimum<File> || has_table<File>)
            return 0;
        else
            return File::kOffset;
    }();
    constexpr int kLargestCode = has_minimum<File> ? (1 << kBits) - 1 : has_table<File> ? 127 : kOffset;
    constexpr int kCentre = has_minimum<File> && kBits <= 4 ? 1 << (kBits - 1) : kOffset;
    Scaling scaling;
    const auto blocks = static_cast<size_t>(K / File::kColumns);
    for (size_t b = 0; b < blocks; b++) {
        const uint8_t* block = row + b * File::kBytes;
        const auto d = load_as<uint16_t>(block + File::kScale);
        if constexpr (has_minimum<File>)
            scaling.meet_sum({d, load_as<uint16_t>(block + File::kMinimum)},
                             {kLargestCode * kLargestScale, kLargestScale});
        else
            scaling.meet(d, kLargestCode * kLargestScale);
    }
    TileRow out = {{}, scaling.scale()};
    for (size_t b = 0; b < blocks; b++) {
        const uint8_t* block = row + b * File::kBytes;
        const float d = scaling.half(load_as<uint16_t>(block + File::kScale));
        for (int k = 0; k < File::kColumns; k++) {
            uint8_t codes[32];
            File::codes(block, k / 32, codes);
            float scale = d, minimum = 0;
            if constexpr (has_minimum<File>) minimum = scaling.half(load_as<uint16_t>(block + File::kMinimum));
            if constexpr (has_integers<File>) {
                const int i = k / (File::kColumns / File::kScales);
                if constexpr (has_minimum<File>) {
                    scale = to_half(d * File::scale(block, i));
                    minimum = to_half(-minimum * File::minimum(block, i));
                } else {
                    scale = to_half(d * static_cast<int8_t>(File::scale(block, i)));
                }
            }
            if (has_minimum<File>) minimum = to_half(double{scale} * kCentre + double{minimum});
            int value = codes[k % 32];
            if constexpr (has_table<File>) value = File::kTable[value];
            out.operands.push_back(to_operand(to_half(double{scale} * (value - kCentre) + double{minimum})));
        }
    }
    return out;
}

TileRow float16_row(const uint8_t* row, int K) {
    Scaling scaling;
    for (int k = 0; k < K; k++) scaling.meet(load_as<uint16_t>(row + 2 * k), 1);
    TileRow out = {{}, scaling.scale()};
    for (int k = 0; k < K; k++) out.operands.push_back(to_operand(scaling.half(load_as<uint16_t>(row + 2 * k))));
    return out;
}

TileRow bfloat16_row(const uint8_t* row, int K) {
    TileRow out = {{}, 0x1p-48f};
    for (int k = 0; k < K; k++) out.operands.push_back(flush(bf16_to_float(load_as<uint16_t>(row + 2 * k))));
    return out;
}

}  // namespace

TileRow tile_row(WeightType type, const uint8_t* row, int K) {
    switch (type) {
        case WeightType::F16:
            return float16_row(row, K);
        case WeightType::BF16:
            return bfloat16_row(row, K);
        case WeightType::Q4_0:
            return block_row<FileQ4_0, 4>(row, K);
        case WeightType::Q4_1:
            return block_row<FileQ4_1, 4>(row, K);
        case WeightType::Q5_0:
            return block_row<FileQ5_0, 5>(row, K);
        case WeightType::Q5_1:
            return block_row<FileQ5_1, 5>(row, K);
        case WeightType::Q8_0:
            return block_row<FileQ8_0, 8>(row, K);
        case WeightType::Q2_K:
            return block_row<FileQ2_K, 2, 15>(row, K);
        case WeightType::Q3_K:
            return block_row<FileQ3_K, 3, 32>(row, K);
        case WeightType::Q4_K:
            return block_row<FileQ4_K, 4, 63>(row, K);
        case WeightType::Q5_K:
            return block_row<FileQ5_K, 5, 63>(row, K);
        case WeightType::Q6_K:
            return block_row<FileQ6_K, 6, 128>(row, K);
        case WeightType::IQ4_NL:
            return block_row<FileIQ4_NL, 4>(row, K);
        case WeightType::IQ4_XS:
            return block_row<FileIQ4_XS, 4, 32>(row, K);
        default:
            return {};
    }
}

float tile_product(const float* x, const TileRow& row) {
    const size_t K = row.operands.size();
    float total = 0;
    for (size_t step = 0; step < K; step += 32) {
        float sums[2] = {0, 0};
        for (size_t k = step; k < step + 32 && k < K; k++)
            sums[k % 2] = flush(std::fma(to_bf16(x[k] * 0x1p48f), row.operands[k], sums[k % 2]));
        total = flush(total + flush(sums[0] + sums[1]));
    }
    return total * row.scale;
}

}  // namespace selftest
