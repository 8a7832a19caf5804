// fields.h: the codes of 16 rows x 32 columns of a quantised weight, kBits bits each, as strings of bits; and the way
// from a code to the binary16 number that it stands for.
//
// A lane is one row and one parity of columns: its sixteen codes (columns parity, parity + 2, ...) are a string of
// 16 kBits bits, the first code lowest, cut into words. One vector holds one word of the 32 lanes (lane 2 r + parity).
// This order is that of a weight tile (column pair, row, parity), so a code needs a shift, but no move between lanes.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "types.h"

namespace pelton::amx {

constexpr int kLaneCodes = 16;  // codes of a lane, column pairs of a step
constexpr int kWordBits = 16;

// Calls f(constant<0>) ... f(constant<N - 1>).
template <int kValue>
struct Constant {
    static constexpr int value = kValue;
};
template <int kCount, int kFirst = 0, class F>
[[gnu::always_inline]] inline void unroll(const F& f) {
    if constexpr (kFirst < kCount) {
        f(Constant<kFirst>{});
        unroll<kCount, kFirst + 1>(f);
    }
}

template <int kBits>
struct Fields {
    static_assert(kBits >= 2 && kBits <= 8);
    static constexpr int kBytes = 64 * kBits;

    // Stores the codes of row r (0..15), 32 of them.
    static void put(const uint8_t* codes, int r, uint8_t* fields) {
        for (int parity = 0; parity < 2; parity++) {
            unsigned __int128 string = 0;
            const uint64_t mask = (0x0001000100010001u * ((1u << kBits) - 1)) << (8 * parity);
            for (int i = 0; i < 4; i++) {
                uint64_t eight;
                __builtin_memcpy(&eight, codes + 8 * i, sizeof eight);
                string |= static_cast<unsigned __int128>(_pext_u64(eight, mask)) << (4 * kBits * i);
            }
            for (int w = 0; w < kBits; w++, string >>= kWordBits)
                store_as(fields + 64 * w + 4 * r + 2 * parity, static_cast<uint16_t>(string));
        }
    }

    struct Lanes {
        __m512i words[kBits];
    };
    [[gnu::always_inline]] static Lanes load(const uint8_t* fields) {
        Lanes lanes;
#pragma GCC unroll 8
        for (int w = 0; w < kBits; w++) lanes.words[w] = _mm512_loadu_si512(fields + 64 * w);
        return lanes;
    }
    // The kCount bits of every lane's string from bit kFrom on, moved to bit kTo of its word; what stands around them
    // is not cleared.
    template <int kFrom, int kCount, int kTo>
    [[gnu::always_inline]] static __m512i bits(const Lanes& lanes) {
        constexpr int kWord = kFrom / kWordBits, kRight = kFrom % kWordBits - kTo;
        if constexpr (kFrom % kWordBits + kCount > kWordBits)
            return _mm512_shrdi_epi16(lanes.words[kWord], lanes.words[kWord + 1], kRight);
        else if constexpr (kRight < 0)
            return _mm512_slli_epi16(lanes.words[kWord], -kRight);
        else if constexpr (kRight > 0)
            return _mm512_srli_epi16(lanes.words[kWord], kRight);
        else
            return lanes.words[kWord];
    }
};

// Codes as binary16 numbers, less kCentre. What is cheapest depends on the width.
template <int kBits>
struct CodeValues;

// The entries of a file type's kTable that codes of four bits name. They fill both halves of a table of 32 words, so
// that the bit above a code does not matter.
template <class File>
class TableValues {
  public:
    static constexpr int kCentre = 0;
    using Lanes = typename Fields<4>::Lanes;

    [[gnu::always_inline]] TableValues() {
        const __m256i values = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(File::kTable)));
        table_ = (__m512i)_mm512_cvtepi16_ph(_mm512_broadcast_i64x4(values));
    }
    template <int i>
    [[gnu::always_inline]] __m512h get(const Lanes& lanes) const {
        return (__m512h)_mm512_permutexvar_epi16(Fields<4>::template bits<4 * i, 4, 0>(lanes), table_);
    }

  private:
    __m512i table_;
};

// Up to four bits: minus half their range they are integers of three significant bits, whose low byte as a binary16
// number is zero. The high byte comes out of a table of bytes, by the six bits of a window that holds kWindowCodes
// codes: a table for each place in it.
template <int kBits>
    requires(kBits <= 4)
struct CodeValues<kBits> {
    static constexpr int kCentre = 1 << (kBits - 1);
    using Lanes = typename Fields<kBits>::Lanes;

    [[gnu::always_inline]] CodeValues() {
        for (int place = 0; place < kWindowCodes; place++) tables_[place] = _mm512_load_si512(kTables.bytes[place]);
    }
    template <int i>
    [[gnu::always_inline]] __m512h get(const Lanes& lanes) const {
        constexpr int kPlace = i % kWindowCodes, kFirst = i - kPlace, kLeft = kLaneCodes - kFirst;
        constexpr int kCount = kLeft < kWindowCodes ? kLeft : kWindowCodes;
        const __m512i window = Fields<kBits>::template bits<kFirst * kBits, kCount * kBits, 8>(lanes);
        return (__m512h)_mm512_maskz_permutexvar_epi8(0xaaaaaaaaaaaaaaaau, window, tables_[kPlace]);
    }

  private:
    static constexpr int kWindowBits = 6, kWindowCodes = kWindowBits / kBits;
    struct Tables {
        alignas(64) uint8_t bytes[kWindowCodes][1 << kWindowBits];
    };
    static constexpr Tables kTables = [] {
        constexpr uint8_t kHighBytes[] = {0x00, 0x3c, 0x40, 0x42, 0x44, 0x45, 0x46, 0x47, 0x48};  // of 0 ... 8
        Tables tables = {};
        for (int place = 0; place < kWindowCodes; place++)
            for (int window = 0; window < 1 << kWindowBits; window++) {
                const int value = (window >> (kBits * place)) % (1 << kBits) - kCentre;
                tables.bytes[place][window] =
                    value < 0 ? static_cast<uint8_t>(kHighBytes[-value] | 0x80) : kHighBytes[value];
            }
        return tables;
    }();
    __m512i tables_[kWindowCodes];
};

// More bits are cut out and converted.
template <int kBits>
    requires(kBits > 4)
struct CodeValues<kBits> {
    static constexpr int kCentre = 0;
    using Lanes = typename Fields<kBits>::Lanes;

    template <int i>
    [[gnu::always_inline]] __m512h get(const Lanes& lanes) const {
        constexpr int kFrom = i * kBits;
        const __m512i code = Fields<kBits>::template bits<kFrom, kBits, 0>(lanes);
        if constexpr (kFrom % kWordBits + kBits == kWordBits)
            return _mm512_cvtepu16_ph(code);
        else
            return _mm512_cvtepu16_ph(_mm512_and_si512(code, _mm512_set1_epi16((1 << kBits) - 1)));
    }
};

}  // namespace pelton::amx
