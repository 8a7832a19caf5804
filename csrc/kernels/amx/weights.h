// weights.h: weights as they wait in memory, and their way to bf16 tiles.
//
// A tile of 16 rows is cut into groups of 256 columns: a header with the scales of eight steps of 32 columns, then the
// steps; the last group may have fewer. Nothing is rounded here: a tile holds the file's numbers in another order.
// `unpack_step` makes a step's operand tile, [column pair][row][2] of bf16: the float32 value that the file's format
// defines (formats/quants.py), rounded to nearest even; subnormal values become zero, as they are zero to the tile
// product.
#pragma once

#include "kernels/amx/fields.h"
#include "kernels/amx/tiles.h"
#include "kernels/portable/file_blocks.h"

namespace pelton::amx {

constexpr int kGroupSteps = 8;
constexpr int kGroupColumns = kGroupSteps * kStepColumns;

constexpr int num_steps(int K) { return (K + kStepColumns - 1) / kStepColumns; }
constexpr int num_groups(int K) { return (K + kGroupColumns - 1) / kGroupColumns; }

// Where a step of a tile stands.
template <class Weights>
struct Layout {
    static constexpr size_t kGroupBytes = Weights::kHeaderBytes + size_t{kGroupSteps} * Weights::kStepBytes;

    static size_t tile_bytes(int K) {
        return static_cast<size_t>(num_groups(K)) * Weights::kHeaderBytes +
               static_cast<size_t>(num_steps(K)) * Weights::kStepBytes;
    }
    static size_t header(int step) { return static_cast<size_t>(step / kGroupSteps) * kGroupBytes; }
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

// One value per row, spread over the lanes of a part: lane 2 r + parity of part 0 is row r, of part 1 row 8 + r.
template <int kPart>
[[gnu::always_inline]] inline __m512 spread(__m512 rows) {
    constexpr int f = 8 * kPart;
    return _mm512_permutexvar_ps(_mm512_set_epi32(f + 7, f + 7, f + 6, f + 6, f + 5, f + 5, f + 4, f + 4, f + 3, f + 3,
                                                  f + 2, f + 2, f + 1, f + 1, f, f),
                                 rows);
}

// value = scale * code + minimum, for 16 rows.
struct Affine {
    __m512 scale, minimum;
};
// Of a format without a minimum. -0, where a table has the values, changes no number, nor the sign of a zero.
template <class File>
[[gnu::always_inline]] inline Affine without_minimum(__m512 scale) {
    if constexpr (requires { File::kTable; })
        return {scale, _mm512_set1_ps(-0.0f)};
    else
        return {scale, _mm512_mul_ps(scale, _mm512_set1_ps(-File::kOffset))};
}

// Codes to what a scale multiplies: themselves, or the entries of the format's table.
template <class File, int kBits>
struct FileValues : CodeValues<kBits> {};
template <class File, int kBits>
    requires requires { File::kTable; }
struct FileValues<File, kBits> {
    const __m512 table =
        _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(File::kTable))));
    [[gnu::always_inline]] __m512 operator()(__m512i code) const { return _mm512_permutexvar_ps(code, table); }
};

// Converts the codes of one step. `affine(i)` is that of column pairs [8 i, 8 i + 8).
template <class File, int kBits, bool kHalves, class AffineOf>
[[gnu::always_inline]] inline void unpack_codes(const uint8_t* fields, const AffineOf& affine, uint16_t* tile) {
    const auto low = Fields<kBits>::template load<0>(fields), high = Fields<kBits>::template load<1>(fields);
    const FileValues<File, kBits> value;
    Affine part0 = {}, part1 = {};
    unroll<kLaneCodes>([&](auto pair) __attribute__((always_inline)) {
        constexpr int i = decltype(pair)::value;
        if constexpr (i == 0 || (kHalves && i == kLaneCodes / 2)) {
            const Affine rows = affine(i / (kLaneCodes / 2));
            part0 = {spread<0>(rows.scale), spread<0>(rows.minimum)};
            part1 = {spread<1>(rows.scale), spread<1>(rows.minimum)};
        }
        const __m512 w0 = _mm512_fmadd_ps(value(Fields<kBits>::template code<i>(low)), part0.scale, part0.minimum);
        const __m512 w1 = _mm512_fmadd_ps(value(Fields<kBits>::template code<i>(high)), part1.scale, part1.minimum);
        _mm512_store_si512(tile + 32 * i, (__m512i)_mm512_cvtne2ps_pbh(w1, w0));
    });
}

[[gnu::always_inline]] inline __m512 load_halves(const uint8_t* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
[[gnu::always_inline]] inline __m512 load_unsigned(const uint8_t* from) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
[[gnu::always_inline]] inline __m512 load_signed(const uint8_t* from) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
inline void put_half(uint8_t* halves, int r, const uint8_t* from) { __builtin_memcpy(halves + 2 * r, from, 2); }

constexpr int kHalvesBytes = 2 * kRows;  // one binary16 value per row

// Types with blocks of 32. Header: the scales of step 0..7, then their minimums.
template <class File, int kCodeBits>
struct Legacy {
    static constexpr bool kHasMinimum = requires { File::kMinimum; };
    static constexpr int kBlockColumns = File::kColumns, kBlockBytes = File::kBytes;
    static constexpr int kMinimums = kGroupSteps * kHalvesBytes;
    static constexpr int kHeaderBytes = (kHasMinimum ? 2 : 1) * kMinimums;
    static constexpr int kStepBytes = Fields<kCodeBits>::kBytes;

    static void pack(const uint8_t* block, int step, int r, uint8_t* header, uint8_t* fields) {
        uint8_t codes[kBlockColumns];
        File::codes(block, 0, codes);
        Fields<kCodeBits>::put(codes, r, fields);
        header += step % kGroupSteps * kHalvesBytes;
        put_half(header, r, block + File::kScale);
        if constexpr (kHasMinimum) put_half(header + kMinimums, r, block + File::kMinimum);
    }
    [[gnu::always_inline]] static void unpack(const uint8_t* header, const uint8_t* fields, int step, uint16_t* tile) {
        header += step % kGroupSteps * kHalvesBytes;
        const __m512 scale = load_halves(header);
        const auto affine = [&](int) __attribute__((always_inline)) {
            if constexpr (kHasMinimum)
                return Affine{scale, load_halves(header + kMinimums)};
            else
                return without_minimum<File>(scale);
        };
        unpack_codes<File, kCodeBits, false>(fields, affine, tile);
    }
};

// Types with blocks of 256. Header: d (and dmin) of the group's rows, then the integer scales (and minimums), one
// vector of sixteen rows per 256 / kScales columns.
template <class File, int kCodeBits>
struct KQuant {
    static constexpr bool kHasMinimum = requires { File::kMinimum; };
    static constexpr int kScales = File::kScales;
    static constexpr int kBlockColumns = File::kColumns, kBlockBytes = File::kBytes;
    static constexpr int kScalesAt = 2 * kHalvesBytes, kMinimumsAt = kScalesAt + kScales * kRows;
    static constexpr int kHeaderBytes = kMinimumsAt + (kHasMinimum ? kScales * kRows : 0);
    static constexpr int kStepBytes = Fields<kCodeBits>::kBytes;
    static constexpr int kStepScales = kScales / kGroupSteps;

    static void pack(const uint8_t* block, int, int r, uint8_t* header, uint8_t* fields) {
        uint8_t codes[kStepColumns];
        for (int step = 0; step < kGroupSteps; step++) {
            File::codes(block, step, codes);
            Fields<kCodeBits>::put(codes, r, fields + kStepBytes * step);
        }
        put_half(header, r, block + File::kScale);
        for (int i = 0; i < kScales; i++) header[kScalesAt + kRows * i + r] = File::scale(block, i);
        if constexpr (kHasMinimum) {
            put_half(header + kHalvesBytes, r, block + File::kMinimum);
            for (int i = 0; i < kScales; i++) header[kMinimumsAt + kRows * i + r] = File::minimum(block, i);
        }
    }
    [[gnu::always_inline]] static void unpack(const uint8_t* header, const uint8_t* fields, int step, uint16_t* tile) {
        const int first = step % kGroupSteps * kStepScales * kRows;
        const __m512 d = load_halves(header);
        const auto affine = [&](int half) __attribute__((always_inline)) {
            const int at = first + half * kRows;
            if constexpr (kHasMinimum) {
                const __m512 dmin = load_halves(header + kHalvesBytes), zero = _mm512_setzero_ps();
                return Affine{_mm512_mul_ps(d, load_unsigned(header + kScalesAt + at)),
                              _mm512_fnmadd_ps(dmin, load_unsigned(header + kMinimumsAt + at), zero)};
            } else {
                return without_minimum<File>(_mm512_mul_ps(d, load_signed(header + kScalesAt + at)));
            }
        };
        unpack_codes<File, kCodeBits, kStepScales == 2>(fields, affine, tile);
    }
};

// 16-bit floats: a step is the tile itself, [column pair][row][2].
struct Wide {
    static constexpr int kBlockColumns = 1, kBlockBytes = 2, kHeaderBytes = 0, kStepBytes = kTileBytes;
};
struct BFloat16 : Wide {
    [[gnu::always_inline]] static void unpack(const uint8_t*, const uint8_t* fields, int, uint16_t* tile) {
        for (int i = 0; i < kLaneCodes; i++) _mm512_store_si512(tile + 32 * i, _mm512_loadu_si512(fields + 64 * i));
    }
};
struct Float16 : Wide {
    [[gnu::always_inline]] static void unpack(const uint8_t*, const uint8_t* fields, int, uint16_t* tile) {
        for (int i = 0; i < kLaneCodes; i++) {
            const __m512 part0 = load_halves(fields + 64 * i), part1 = load_halves(fields + 64 * i + 32);
            _mm512_store_si512(tile + 32 * i, (__m512i)_mm512_cvtne2ps_pbh(part1, part0));
        }
    }
};

using Q4_0 = Legacy<FileQ4_0, 4>;
using Q4_1 = Legacy<FileQ4_1, 4>;
using Q5_0 = Legacy<FileQ5_0, 5>;
using Q5_1 = Legacy<FileQ5_1, 5>;
using Q8_0 = Legacy<FileQ8_0, 8>;
using IQ4_NL = Legacy<FileIQ4_NL, 4>;
using IQ4_XS = KQuant<FileIQ4_XS, 4>;
using Q2_K = KQuant<FileQ2_K, 2>;
using Q3_K = KQuant<FileQ3_K, 3>;
using Q4_K = KQuant<FileQ4_K, 4>;
using Q5_K = KQuant<FileQ5_K, 5>;
using Q6_K = KQuant<FileQ6_K, 6>;

}  // namespace pelton::amx
