// dot.h for AVX-512 with VNNI: sixteen rows at a time. Included by kernels/portable/dot.h.
#pragma once

namespace pelton::PELTON_ISA {

using Bytes = __m512i;

PELTON_INLINE Bytes load_bytes(const uint8_t* p) { return _mm512_load_si512(p); }
PELTON_INLINE Bytes and_mask(Bytes a, uint8_t mask) { return _mm512_and_si512(a, _mm512_set1_epi8((char)mask)); }
// Shifts by a constant number of bits, towards the high end if positive; bits cross bytes: mask afterwards.
template <int kBits>
PELTON_INLINE Bytes shift(Bytes a) {
    if constexpr (kBits >= 0)
        return _mm512_slli_epi16(a, kBits);
    else
        return _mm512_srli_epi16(a, -kBits);
}

PELTON_INLINE VecF fused(VecF a, VecF b, VecF c) { return _mm512_fmadd_ps(a, b, c); }
PELTON_INLINE VecF to_float(VecI a) { return _mm512_cvtepi32_ps((__m512i)a); }
PELTON_INLINE VecI load_u8(const uint8_t* p) { return (VecI)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
PELTON_INLINE VecI load_s8(const uint8_t* p) { return (VecI)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)); }
PELTON_INLINE VecF load_half(const void* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
PELTON_INLINE VecF load_bf16(const void* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

// Four columns of one row of x, for every row of weights.
PELTON_INLINE __m512i four_columns(const int8_t* x) { return _mm512_set1_epi32(load_as<int32_t>(x)); }

// kGroups groups of four columns. Two sums side by side hide the latency of vpdpbusd.
template <int kGroups>
PELTON_INLINE VecI sum_from(int32_t start, const Bytes* w, const int8_t* x) {
    __m512i even = _mm512_set1_epi32(start), odd = _mm512_setzero_si512();
    for (int i = 0; i < kGroups; i += 2) {
        even = _mm512_dpbusd_epi32(even, w[i], four_columns(x + 4 * i));
        odd = _mm512_dpbusd_epi32(odd, w[i + 1], four_columns(x + 4 * i + 4));
    }
    return (VecI)_mm512_add_epi32(even, odd);
}

// sum of w[k] x[k] over 32 columns, exact; kSafe is of use to other instruction sets.
template <int kSafe>
PELTON_INLINE VecI dot(const Bytes (&w)[8], const int8_t* x) {
    return sum_from<8>(0, w, x);
}

// Integer scales of kLanes rows, as pairs of 16 bits: (a, b) in the low and high half of a row's 32.
using Pairs = __m512i;
PELTON_INLINE Pairs pairs(VecI a, VecI b) { return (__m512i)((a & 0xffff) | (b << 16)); }
// a * first half's sum of x + b * second half's
PELTON_INLINE VecI dot_halves(Pairs ab, const int16_t (&half_sums)[2]) {
    return (VecI)_mm512_madd_epi16(ab, _mm512_set1_epi32(load_as<int32_t>(half_sums)));
}

// The same with an integer scale (8 bits) for the block, or for each half of it.
using Scale = VecI;
PELTON_INLINE Scale scale_of(VecI a) { return a; }
template <int kSafe>
PELTON_INLINE VecI dot(const Bytes (&w)[8], const int8_t* x, Scale scale) {
    return sum_from<8>(0, w, x) * scale;
}
template <int kSafe>
PELTON_INLINE VecI dot(const Bytes (&w)[8], const int8_t* x, Scale first, Scale second) {
    return sum_from<4>(0, w, x) * first + sum_from<4>(0, w + 4, x + 16) * second;
}

// Signed weights: w + 128 is unsigned, and what that adds, 128 sum(x) = -16 * minus_sum8, is taken off first.
struct SignedBytes {
    Bytes shifted;
};
PELTON_INLINE SignedBytes load_signed(const uint8_t* p) {
    return {_mm512_xor_si512(load_bytes(p), _mm512_set1_epi8((char)0x80))};
}
PELTON_INLINE VecI dot(const SignedBytes (&w)[8], const int8_t* x, int32_t minus_sum8) {
    const Bytes bytes[8] = {w[0].shifted, w[1].shifted, w[2].shifted, w[3].shifted,
                            w[4].shifted, w[5].shifted, w[6].shifted, w[7].shifted};
    return sum_from<8>(16 * minus_sum8, bytes, x);
}
PELTON_INLINE VecI dot(const SignedBytes (&w)[8], const int8_t* x, int32_t minus_sum8, Scale scale) {
    return dot(w, x, minus_sum8) * scale;
}

// Sixteen signed values (shifted), and those that codes (0..15) stand for.
using Table = __m512i;
PELTON_INLINE Table load_table(const int8_t (&values)[16]) {
    const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)values));
    return _mm512_xor_si512(table, _mm512_set1_epi8((char)0x80));
}
PELTON_INLINE SignedBytes look_up(Table table, Bytes codes) { return {_mm512_shuffle_epi8(table, codes)}; }

}  // namespace pelton::PELTON_ISA
