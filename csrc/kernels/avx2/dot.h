// dot.h for AVX2, FMA and F16C: eight rows at a time. Included by kernels/portable/dot.h.
#pragma once

namespace pelton::PELTON_ISA {

using Bytes = __m256i;

PELTON_INLINE Bytes load_bytes(const uint8_t* p) { return _mm256_load_si256((const __m256i*)p); }
PELTON_INLINE Bytes and_mask(Bytes a, uint8_t mask) { return _mm256_and_si256(a, _mm256_set1_epi8((char)mask)); }
// Shifts by a constant number of bits, towards the high end if positive; bits cross bytes: mask afterwards.
template <int kBits>
PELTON_INLINE Bytes shift(Bytes a) {
    if constexpr (kBits >= 0)
        return _mm256_slli_epi16(a, kBits);
    else
        return _mm256_srli_epi16(a, -kBits);
}

PELTON_INLINE VecF fused(VecF a, VecF b, VecF c) { return _mm256_fmadd_ps(a, b, c); }
PELTON_INLINE VecF to_float(VecI a) { return _mm256_cvtepi32_ps((__m256i)a); }
PELTON_INLINE VecI load_u8(const uint8_t* p) { return (VecI)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
PELTON_INLINE VecI load_s8(const uint8_t* p) { return (VecI)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
PELTON_INLINE VecF load_half(const void* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
PELTON_INLINE VecF load_bf16(const void* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

// Four columns of one row of x, for every row of weights.
PELTON_INLINE __m256i four_columns(const int8_t* x) { return _mm256_set1_epi32(load_as<int32_t>(x)); }

// kGroups groups of four columns times a scale, exact. The scale meets the 16-bit sums, which multiply for free.
template <int kSafe, int kGroups>
PELTON_INLINE __m256i scaled_sum(const Bytes* w, const int8_t* x, __m256i scale) {
    __m256i total = _mm256_setzero_si256();
    for (int i = 0; i < kGroups; i += kSafe) {
        __m256i part = _mm256_maddubs_epi16(w[i], four_columns(x + 4 * i));
        for (int j = i + 1; j < i + kSafe; j++)
            part = _mm256_add_epi16(part, _mm256_maddubs_epi16(w[j], four_columns(x + 4 * j)));
        part = _mm256_madd_epi16(part, scale);
        total = i ? _mm256_add_epi32(total, part) : part;
    }
    return total;
}

// sum of w[k] x[k] over 32 columns, exact. kSafe is how many products of four columns fit 16 bits together:
// 8 for weights up to 15, 4 up to 31, 2 up to 63.
template <int kSafe>
PELTON_INLINE VecI dot(const Bytes (&w)[8], const int8_t* x) {
    return (VecI)scaled_sum<kSafe, 8>(w, x, _mm256_set1_epi16(1));
}

// Integer scales of kLanes rows, as pairs of 16 bits: (a, b) in the low and high half of a row's 32.
using Pairs = __m256i;
PELTON_INLINE Pairs pairs(VecI a, VecI b) { return (__m256i)((a & 0xffff) | (b << 16)); }
// a * first half's sum of x + b * second half's
PELTON_INLINE VecI dot_halves(Pairs ab, const int16_t (&half_sums)[2]) {
    return (VecI)_mm256_madd_epi16(ab, _mm256_set1_epi32(load_as<int32_t>(half_sums)));
}

// The same with an integer scale (8 bits) for the block, or for each half of it.
using Scale = __m256i;
PELTON_INLINE Scale scale_of(VecI a) { return pairs(a, a); }
template <int kSafe>
PELTON_INLINE VecI dot(const Bytes (&w)[8], const int8_t* x, Scale scale) {
    return (VecI)scaled_sum<kSafe, 8>(w, x, scale);
}
template <int kSafe>
PELTON_INLINE VecI dot(const Bytes (&w)[8], const int8_t* x, Scale first, Scale second) {
    return (VecI)_mm256_add_epi32(scaled_sum<kSafe, 4>(w, x, first), scaled_sum<kSafe, 4>(w + 4, x + 16, second));
}

// Signed weights. maddubs would saturate on u8 x s8 pairs, so the sign moves to x: |w| x <= 128 * 127 * 2.
struct SignedBytes {
    Bytes value, magnitude;
};
PELTON_INLINE SignedBytes load_signed(const uint8_t* p) {
    const Bytes value = load_bytes(p);
    return {value, _mm256_abs_epi8(value)};
}
PELTON_INLINE VecI dot(const SignedBytes (&w)[8], const int8_t* x, int32_t, Scale scale) {
    __m256i total = _mm256_setzero_si256();
    for (int i = 0; i < 8; i++) {
        const __m256i signed_x = _mm256_sign_epi8(four_columns(x + 4 * i), w[i].value);
        const __m256i part = _mm256_madd_epi16(_mm256_maddubs_epi16(w[i].magnitude, signed_x), scale);
        total = i ? _mm256_add_epi32(total, part) : part;
    }
    return (VecI)total;
}
PELTON_INLINE VecI dot(const SignedBytes (&w)[8], const int8_t* x, int32_t minus_sum8) {
    return dot(w, x, minus_sum8, _mm256_set1_epi16(1));
}

// Sixteen signed values, and those that codes (0..15) stand for.
using Table = __m256i;
PELTON_INLINE Table load_table(const int8_t (&values)[16]) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)values));
}
PELTON_INLINE SignedBytes look_up(Table table, Bytes codes) {
    const Bytes value = _mm256_shuffle_epi8(table, codes);
    return {value, _mm256_abs_epi8(value)};
}

}  // namespace pelton::PELTON_ISA
