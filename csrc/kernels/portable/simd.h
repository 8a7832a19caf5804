// simd.h: float vectors as wide as this unit's instruction set, for sources that are compiled once per set.
//
// Everything lies in the set's own namespace and is inlined: no code may be shared with units of another set.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define PELTON_INLINE __attribute__((always_inline)) inline

namespace pelton::PELTON_ISA {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

using VecF = float __attribute__((vector_size(kLanes * 4)));
using VecI = int32_t __attribute__((vector_size(kLanes * 4)));
using VecU = uint32_t __attribute__((vector_size(kLanes * 4)));

template <class To, class From>
PELTON_INLINE To bits(From value) {
    static_assert(sizeof(To) == sizeof(From));
    return __builtin_bit_cast(To, value);
}

template <class Vec = VecF>
PELTON_INLINE Vec load(const void* from) {
    Vec value;
    __builtin_memcpy(&value, from, sizeof value);
    return value;
}

template <class Vec>
PELTON_INLINE void store(void* to, Vec value) {
    __builtin_memcpy(to, &value, sizeof value);
}

PELTON_INLINE VecF splat(float value) { return value - VecF{}; }
PELTON_INLINE VecI splat(int32_t value) { return value - VecI{}; }

// a * b + c, rounded once where the instruction set has a fused multiply-add (all but generic x86-64), and
// twice where not: the reason why the instruction set is part of the numerics fingerprint.
PELTON_INLINE VecF fma(VecF a, VecF b, VecF c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
    return vfmaq_f32(c, a, b);
#else
    return a * b + c;
#endif
}

// The same for one number, with the same rounding.
PELTON_INLINE float fma(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

// sum = a * b + sum, with the same bits as fma. Written so that the compiler leaves `sum` in its register: GCC 12
// otherwise moves accumulators about, and spills some where a tile of them fills the registers.
PELTON_INLINE void accumulate(VecF& sum, VecF a, VecF b) {
#if defined(__AVX512F__)
    asm volatile("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
#elif defined(__FMA__)
    asm volatile("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
#else
    sum = fma(a, b, sum);
#endif
}

// The larger and the smaller; b where either is not a number. (GCC 12 warns of the AVX-512 forms without a mask.)
#if defined(__AVX512F__)
PELTON_INLINE VecF max(VecF a, VecF b) { return _mm512_mask_max_ps(a, 0xffff, a, b); }
PELTON_INLINE VecF min(VecF a, VecF b) { return _mm512_mask_min_ps(a, 0xffff, a, b); }
#elif defined(__AVX2__)
PELTON_INLINE VecF max(VecF a, VecF b) { return _mm256_max_ps(a, b); }
PELTON_INLINE VecF min(VecF a, VecF b) { return _mm256_min_ps(a, b); }
#else
PELTON_INLINE VecF max(VecF a, VecF b) { return a > b ? a : b; }
PELTON_INLINE VecF min(VecF a, VecF b) { return a < b ? a : b; }
#endif
PELTON_INLINE VecF abs(VecF x) { return bits<VecF>(bits<VecI>(x) & 0x7fffffff); }

// Sums and maxima over the sixteen numbers of kParts vectors: halves onto halves, so that every width of vector
// gives the same bits.
constexpr int kGroup = 16;
constexpr int kParts = kGroup / kLanes;

template <class Op>
PELTON_INLINE float fold_group(const VecF (&parts)[kParts], Op op) {
    using Four = float __attribute__((vector_size(16)));
    Four x[4];
    __builtin_memcpy(x, parts, sizeof x);
    const Four half = op(op(x[0], x[2]), op(x[1], x[3]));
    const Four pair = op(half, Four{half[2], half[3], half[0], half[1]});
    return op(pair, Four{pair[1], pair[0], pair[3], pair[2]})[0];
}

PELTON_INLINE float sum_group(const VecF (&parts)[kParts]) {
    return fold_group(parts, [](auto a, auto b) { return a + b; });
}

PELTON_INLINE float max_group(const VecF (&parts)[kParts]) {
    return fold_group(parts, [](auto a, auto b) { return a > b ? a : b; });
}

}  // namespace pelton::PELTON_ISA
