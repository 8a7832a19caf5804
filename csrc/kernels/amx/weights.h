// weights.h: weights as they wait in memory, and their way to bf16 tiles.
//
// A tile of 16 rows begins with one float32 scale per row; then it is cut into groups of 256 columns: a header with the
// scales of eight steps of 32 columns, then the steps; the last group may have fewer. `unpack_step` makes a step's
// operand tile, [column pair][row][2] of bf16.
//
// Unpacking is what bounds a product with few rows, so it computes in binary16, 32 weights an instruction, and its
// roundings are part of the definition (ops/numerics.py has the same):
//   - Packing multiplies a row's binary16 scales by 2^e, e being such that the largest magnitude that its types and
//     scales allow lies in [2^14, 2^15), and rounds them to binary16 again. What is smaller than about 2^-28 of that
//     loses precision, then becomes zero; all else is exact.
//   - w = scale * (code - centre) + minimum, one rounding; of K-quants scale and minimum are products rounded to
//     binary16; minimum includes scale * centre, rounded, where the format has a minimum.
//   - A binary16 number's bits, shifted right by three, are those of a bf16 number 2^112 times smaller. So operands are
//     rounded there, halves away from zero, and are left that small; subnormal ones are zero to the tile product.
// Activations are 2^48 times their value (activations.h), and the row's scale brings sums to their size: 2^(64 - e).
// A row with a scale that is no finite number has the scale NaN.
#pragma once

#include <type_traits>

#include "kernels/amx/fields.h"
#include "kernels/amx/tiles.h"
#include "kernels/portable/file_blocks.h"

namespace pelton::amx {

constexpr int kGroupSteps = 8;
constexpr int kGroupColumns = kGroupSteps * kStepColumns;
constexpr int kHeadBytes = 4 * kRows;    // a tile's row scales
constexpr int kHalvesBytes = 2 * kRows;  // one binary16 value per row
constexpr float kOperandScale = 0x1p-112f, kActivationScale = 0x1p48f;

constexpr int num_steps(int K) { return (K + kStepColumns - 1) / kStepColumns; }
constexpr int num_groups(int K) { return (K + kGroupColumns - 1) / kGroupColumns; }

// Where a step of a tile stands.
template <class Weights>
struct Layout {
    static constexpr size_t kGroupBytes = Weights::kHeaderBytes + size_t{kGroupSteps} * Weights::kStepBytes;

    static size_t tile_bytes(int K) {
        return kHeadBytes + static_cast<size_t>(num_groups(K)) * Weights::kHeaderBytes +
               static_cast<size_t>(num_steps(K)) * Weights::kStepBytes;
    }
    static size_t header(int step) { return kHeadBytes + static_cast<size_t>(step / kGroupSteps) * kGroupBytes; }
    static size_t fields(int step) {
        return header(step) + Weights::kHeaderBytes + static_cast<size_t>(step % kGroupSteps) * Weights::kStepBytes;
    }
    // The bytes of steps [a, b) are [begin(a), begin(b)), headers included.
    static size_t begin(int step) { return step % kGroupSteps ? fields(step) : header(step); }
};

// Unpacks one step of a tile. A function of its own: inlined into every loop it would be ten times the code.
template <class Weights>
[[gnu::noinline]] void unpack_step(const uint8_t* tile, int step, uint16_t* operand) {
    Weights::unpack(tile + Layout<Weights>::header(step), tile + Layout<Weights>::fields(step), step, operand);
}

// Binary16 to bf16 / 2^112. Rounds halves away from zero; bits 14..12 of a negative number are then copies of the sign.
[[gnu::always_inline]] inline __m512i to_operand(__m512h w) {
    const __m512i shifted = _mm512_mulhrs_epi16((__m512i)w, _mm512_set1_epi16(1 << 12));
    return _mm512_and_si512(shifted, _mm512_set1_epi16(static_cast<int16_t>(0x8fff)));
}

// Words 16 kHalf + r, one per row, to the row's two lanes.
template <int kHalf>
[[gnu::always_inline]] inline __m512h spread(__m512h rows) {
    alignas(64) static constexpr auto kLanes = [] {
        struct {
            uint16_t of[32];
        } from = {};
        for (int lane = 0; lane < 32; lane++) from.of[lane] = static_cast<uint16_t>(16 * kHalf + lane / 2);
        return from;
    }();
    return (__m512h)_mm512_permutexvar_epi16(_mm512_load_si512(kLanes.of), (__m512i)rows);
}

// value = scale * (code - centre) + minimum, for 16 rows.
struct Affine {
    __m512h scale, minimum;
};
// Of code - kCentre, given what the format says of code - kOffset, or of the code and a minimum.
template <int kOffset, int kCentre>
[[gnu::always_inline]] inline Affine centred(__m512h scale) {
    if constexpr (kOffset == kCentre) return {scale, _mm512_setzero_ph()};
    return {scale, _mm512_mul_ph(scale, _mm512_set1_ph(kCentre - kOffset))};
}
template <int kCentre>
[[gnu::always_inline]] inline Affine centred(__m512h scale, __m512h minimum) {
    if constexpr (kCentre == 0) return {scale, minimum};
    return {scale, _mm512_fmadd_ph(scale, _mm512_set1_ph(kCentre), minimum)};
}

// What the codes of a file type stand for.
template <class File, int kBits>
struct CodesOf {
    static constexpr bool kHasMinimum = requires { File::kMinimum; }, kHasTable = requires { File::kTable; };
    using Values = std::conditional_t<kHasTable, TableValues<File>, CodeValues<kBits>>;
    static constexpr int kOffset = [] {
        if constexpr (kHasMinimum || kHasTable)
            return 0;
        else
            return File::kOffset;
    }();
    // The largest magnitude of a code's value.
    static constexpr int kLargest = [] {
        if constexpr (kHasTable)
            return -File::kTable[0];
        else
            return kHasMinimum ? (1 << kBits) - 1 : kOffset;
    }();
};

// Converts the codes of one step. `affine(h)` is that of column pairs [8 h, 8 h + 8), if the halves differ.
template <class Values, int kBits, bool kHalves, class AffineOf>
[[gnu::always_inline]] inline void unpack_codes(const uint8_t* fields, const AffineOf& affine, uint16_t* tile) {
    const auto lanes = Fields<kBits>::load(fields);
    const Values values;
    Affine rows = {};
    unroll<kLaneCodes>([&](auto pair) __attribute__((always_inline)) {
        constexpr int i = decltype(pair)::value;
        if constexpr (i == 0 || (kHalves && i == kLaneCodes / 2)) rows = affine(Constant<i / (kLaneCodes / 2)>{});
        const __m512h w = _mm512_fmadd_ph(values.template get<i>(lanes), rows.scale, rows.minimum);
        _mm512_store_si512(tile + 32 * i, to_operand(w));
    });
}

// Packing: a row's exponent, and numbers multiplied by its power of two.
inline bool is_finite_half(uint16_t half) { return (half & 0x7c00) != 0x7c00; }
inline float finite_half(const uint8_t* from) {
    const auto half = load_as<uint16_t>(from);
    return is_finite_half(half) ? half_to_float(half) : 0.0f;
}
// Stores 2^e and the row's scale of sums. `largest` is a normal number or zero.
struct RowScale {
    float power, scale;
    RowScale(float largest, bool is_finite) {
        constexpr int kLargestExponent = 14;
        const int exponent = static_cast<int>(__builtin_bit_cast(uint32_t, largest) >> 23) - 127;
        power = largest > 0 ? power_of_two(kLargestExponent - exponent) : 1.0f;
        scale = is_finite ? 1.0f / (kOperandScale * kActivationScale * power) : __builtin_nanf("");
    }
    static float power_of_two(int e) { return __builtin_bit_cast(float, static_cast<uint32_t>(e + 127) << 23); }
};
inline void put_half(uint8_t* halves, int r, float value) {
    store_as(halves + 2 * r, static_cast<uint16_t>(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT)));
}

// Types with blocks: a row's scale from the binary16 numbers of all its blocks. The largest magnitude is at most
// kScaleReach |scale| + kMinimumReach |minimum|.
template <class Weights>
RowScale scale_blocks(const uint8_t* row, int K) {
    using File = typename Weights::File;
    float largest = 0;
    bool is_finite = true;
    for (const uint8_t* block = row; block < row + static_cast<size_t>(K / File::kColumns) * File::kBytes;
         block += File::kBytes) {
        is_finite &= is_finite_half(load_as<uint16_t>(block + File::kScale));
        float reach = Weights::kScaleReach * __builtin_fabsf(finite_half(block + File::kScale));
        if constexpr (Weights::kHasMinimum) {
            is_finite &= is_finite_half(load_as<uint16_t>(block + File::kMinimum));
            reach += Weights::kMinimumReach * __builtin_fabsf(finite_half(block + File::kMinimum));
        }
        if (reach > largest) largest = reach;
    }
    return {largest, is_finite};
}

[[gnu::always_inline]] inline __m512h load_words(const uint8_t* from) { return (__m512h)_mm512_loadu_si512(from); }
[[gnu::always_inline]] inline __m256i load_32_bytes(const uint8_t* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}

// Legacy types. Header, for each step: the scales of 16 rows, then their minimums.
template <class FileBlock, int kCodeBits>
struct Legacy {
    using File = FileBlock;
    using Codes = CodesOf<File, kCodeBits>;
    static constexpr bool kIsWide = false, kHasMinimum = Codes::kHasMinimum;
    static constexpr int kStepHeaderBytes = (kHasMinimum ? 2 : 1) * kHalvesBytes;
    static constexpr int kHeaderBytes = kGroupSteps * kStepHeaderBytes, kStepBytes = Fields<kCodeBits>::kBytes;
    static constexpr int kCentre = Codes::Values::kCentre;
    static constexpr float kScaleReach = Codes::kLargest;
    static constexpr float kMinimumReach = 1;

    static RowScale scale_row(const uint8_t* row, int K) { return scale_blocks<Legacy>(row, K); }
    static void pack(const uint8_t* block, int step, int r, float power, uint8_t* header, uint8_t* fields) {
        uint8_t codes[File::kColumns];
        File::codes(block, 0, codes);
        Fields<kCodeBits>::put(codes, r, fields);
        header += step % kGroupSteps * kStepHeaderBytes;
        put_half(header, r, power * finite_half(block + File::kScale));
        if constexpr (kHasMinimum) put_half(header + kHalvesBytes, r, power * finite_half(block + File::kMinimum));
    }
    [[gnu::always_inline]] static void unpack(const uint8_t* header, const uint8_t* fields, int step, uint16_t* tile) {
        header += step % kGroupSteps * kStepHeaderBytes;
        const auto affine = [&](auto) __attribute__((always_inline)) {
            if constexpr (kHasMinimum) {
                const __m512h rows = load_words(header);
                return centred<kCentre>(spread<0>(rows), spread<1>(rows));
            } else {
                return centred<Codes::kOffset, kCentre>(
                    spread<0>((__m512h)_mm512_castsi256_si512(load_32_bytes(header))));
            }
        };
        unpack_codes<typename Codes::Values, kCodeBits, false>(fields, affine, tile);
    }
};

// K-quants. Header: d of 16 rows, then -dmin, or d again; then for each step the rows' integer scales, followed by
// their minimums or the scales of the step's second half, if there are any. Where a step has two scales and two
// minimums: those of its first half, then those of its second.
template <class FileBlock, int kCodeBits, int kLargestScale>
struct KQuant {
    using File = FileBlock;
    using Codes = CodesOf<File, kCodeBits>;
    static constexpr bool kIsWide = false, kHasMinimum = Codes::kHasMinimum;
    static constexpr int kStepScales = File::kScales / kGroupSteps;
    static constexpr int kIntegersAt = 2 * kHalvesBytes, kRun = 2 * kRows;
    static constexpr int kStepHeaderBytes = kStepScales * (kHasMinimum ? kRun : kRows);
    static constexpr int kHeaderBytes = kIntegersAt + kGroupSteps * kStepHeaderBytes;
    static constexpr int kStepBytes = Fields<kCodeBits>::kBytes;
    static constexpr int kCentre = Codes::Values::kCentre;
    static constexpr float kScaleReach = kLargestScale * Codes::kLargest;
    static constexpr float kMinimumReach = kLargestScale;

    static RowScale scale_row(const uint8_t* row, int K) { return scale_blocks<KQuant>(row, K); }
    static void pack(const uint8_t* block, int, int r, float power, uint8_t* header, uint8_t* fields) {
        uint8_t codes[kStepColumns];
        for (int step = 0; step < kGroupSteps; step++) {
            File::codes(block, step, codes);
            Fields<kCodeBits>::put(codes, r, fields + kStepBytes * step);
        }
        const float d = power * finite_half(block + File::kScale);
        put_half(header, r, d);
        uint8_t* integers = header + kIntegersAt + r;
        if constexpr (kHasMinimum) {
            put_half(header + kHalvesBytes, r, -power * finite_half(block + File::kMinimum));
            for (int i = 0; i < File::kScales; i++) {
                integers[kRun * i] = File::scale(block, i);
                integers[kRun * i + kRows] = File::minimum(block, i);
            }
        } else {
            put_half(header + kHalvesBytes, r, d);
            for (int i = 0; i < File::kScales; i++) integers[kRows * i] = File::scale(block, i);
        }
    }
    [[gnu::always_inline]] static void unpack(const uint8_t* header, const uint8_t* fields, int step, uint16_t* tile) {
        const __m512h d = load_words(header);
        const uint8_t* integers = header + kIntegersAt + step % kGroupSteps * kStepHeaderBytes;
        const auto affine = [&](auto half) __attribute__((always_inline)) {
            constexpr int h = decltype(half)::value;
            if constexpr (kHasMinimum) {
                const __m512i words = _mm512_cvtepu8_epi16(load_32_bytes(integers + h * kRun));
                const __m512h products = _mm512_mul_ph(d, _mm512_cvtepu16_ph(words));
                return centred<kCentre>(spread<0>(products), spread<1>(products));
            } else if constexpr (kStepScales == 1) {
                const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(integers));
                const __m512i words = _mm512_castsi256_si512(_mm256_cvtepi8_epi16(bytes));
                return centred<Codes::kOffset, kCentre>(spread<0>(_mm512_mul_ph(d, _mm512_cvtepi16_ph(words))));
            } else {
                const __m512h products =
                    _mm512_mul_ph(d, _mm512_cvtepi16_ph(_mm512_cvtepi8_epi16(load_32_bytes(integers))));
                return centred<Codes::kOffset, kCentre>(spread<h>(products));
            }
        };
        unpack_codes<typename Codes::Values, kCodeBits, kStepScales == 2>(fields, affine, tile);
    }
};

// 16-bit floats: a step is the tile itself, [column pair][row][2]. BF16 stays as it is in the file.
struct Wide {
    static constexpr bool kIsWide = true;
    static constexpr int kHeaderBytes = 0, kStepBytes = kTileBytes;
};
struct BFloat16 : Wide {
    static RowScale scale_row(const uint8_t*, int) {
        RowScale row(0, true);
        row.scale = 1 / kActivationScale;
        return row;
    }
    static uint16_t pack(uint16_t weight, float) { return weight; }
    [[gnu::always_inline]] static void unpack(const uint8_t*, const uint8_t* fields, int, uint16_t* tile) {
        for (int i = 0; i < kLaneCodes; i++) _mm512_store_si512(tile + 32 * i, _mm512_loadu_si512(fields + 64 * i));
    }
};
// Binary16 numbers of a row are multiplied by its 2^e once, when they are packed.
struct Float16 : Wide {
    static RowScale scale_row(const uint8_t* row, int K) {
        float largest = 0;
        bool is_finite = true;
        for (int k = 0; k < K; k++) {
            is_finite &= is_finite_half(load_as<uint16_t>(row + 2 * k));
            const float size = __builtin_fabsf(finite_half(row + 2 * k));
            if (size > largest) largest = size;
        }
        return {largest, is_finite};
    }
    static uint16_t pack(uint16_t weight, float power) {
        uint8_t bytes[2];
        store_as(bytes, weight);
        put_half(bytes, 0, power * finite_half(bytes));
        return load_as<uint16_t>(bytes);
    }
    [[gnu::always_inline]] static void unpack(const uint8_t*, const uint8_t* fields, int, uint16_t* tile) {
        for (int i = 0; i < kLaneCodes; i++) _mm512_store_si512(tile + 32 * i, to_operand(load_words(fields + 64 * i)));
    }
};

using Q4_0 = Legacy<FileQ4_0, 4>;
using Q4_1 = Legacy<FileQ4_1, 4>;
using Q5_0 = Legacy<FileQ5_0, 5>;
using Q5_1 = Legacy<FileQ5_1, 5>;
using Q8_0 = Legacy<FileQ8_0, 8>;
using Q2_K = KQuant<FileQ2_K, 2, 15>;
using Q3_K = KQuant<FileQ3_K, 3, 32>;
using Q4_K = KQuant<FileQ4_K, 4, 63>;
using Q5_K = KQuant<FileQ5_K, 5, 63>;
using Q6_K = KQuant<FileQ6_K, 6, 128>;
using IQ4_NL = Legacy<FileIQ4_NL, 4>;
using IQ4_XS = KQuant<FileIQ4_XS, 4, 32>;

}  // namespace pelton::amx
