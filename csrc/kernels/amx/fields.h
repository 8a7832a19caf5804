// fields.h: the codes of 16 rows x 32 columns of a quantised weight, kBits bits each, as strings of bits.
//
// A lane is one row and one parity of columns: its sixteen codes (columns parity, parity + 2, ...) are a string of
// 16 kBits bits, the first code lowest, cut into dwords. One vector holds one dword of the sixteen lanes of eight rows
// (lane 2 r + parity): first the vectors of rows 0..7, then those of rows 8..15; the odd half dword of an odd kBits
// stands in one shared last vector, rows 0..7 in the low halves, rows 8..15 in the high ones. This order is that of
// a weight tile (column pair, row, parity), so a code needs a shift, but no move between lanes.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "types.h"

namespace pelton::amx {

constexpr int kLaneCodes = 16;  // codes of a lane, column pairs of a step
constexpr int kParts = 2;       // rows 0..7 and rows 8..15

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
    static constexpr int kWholeDwords = kBits / 2;  // of a lane

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
            const int part = r / 8, lane = r % 8 * 2 + parity;
            for (int d = 0; d < kWholeDwords; d++, string >>= 32) {
                const uint32_t dword = static_cast<uint32_t>(string);
                __builtin_memcpy(fields + 64 * (part * kWholeDwords + d) + 4 * lane, &dword, sizeof dword);
            }
            if constexpr (kBits % 2) {
                const uint16_t half = static_cast<uint16_t>(string);
                __builtin_memcpy(fields + 64 * (kBits - 1) + 4 * lane + 2 * part, &half, sizeof half);
            }
        }
    }

    // The lanes of one part, in registers.
    struct Lanes {
        __m512i dwords[kWholeDwords + kBits % 2];
    };
    template <int kPart>
    [[gnu::always_inline]] static Lanes load(const uint8_t* fields) {
        Lanes lanes;
        for (int d = 0; d < kWholeDwords; d++)
            lanes.dwords[d] = _mm512_loadu_si512(fields + 64 * (kPart * kWholeDwords + d));
        if constexpr (kBits % 2) {
            const __m512i shared = _mm512_loadu_si512(fields + 64 * (kBits - 1));
            lanes.dwords[kWholeDwords] = kPart ? _mm512_srli_epi32(shared, 16) : shared;
        }
        return lanes;
    }
    // Code i of every lane in the lowest kBits bits of its dword; the bits above are not cleared.
    template <int i>
    [[gnu::always_inline]] static __m512i code(const Lanes& lanes) {
        constexpr int kFirst = i * kBits, kDword = kFirst / 32, kShift = kFirst % 32;
        if constexpr (kShift == 0)
            return lanes.dwords[kDword];
        else if constexpr (kShift + kBits <= 32)
            return _mm512_srli_epi32(lanes.dwords[kDword], kShift);
        else
            return _mm512_shrdi_epi32(lanes.dwords[kDword], lanes.dwords[kDword + 1], kShift);
    }
};

// Codes to float32. Up to five bits a table does it, which also ignores the bits above a code.
template <int kBits>
class CodeValues {
  public:
    [[gnu::always_inline]] CodeValues() {
        const __m512i index = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        low_ = _mm512_cvtepi32_ps(_mm512_and_si512(index, _mm512_set1_epi32((1 << kBits) - 1)));
        high_ = _mm512_add_ps(low_, _mm512_set1_ps(16));
    }
    [[gnu::always_inline]] __m512 operator()(__m512i code) const {
        if constexpr (kBits <= 4)
            return _mm512_permutexvar_ps(code, low_);
        else if constexpr (kBits == 5)
            return _mm512_permutex2var_ps(low_, code, high_);
        else
            return _mm512_cvtepi32_ps(_mm512_and_si512(code, _mm512_set1_epi32((1 << kBits) - 1)));
    }

  private:
    __m512 low_, high_;
};

}  // namespace pelton::amx
