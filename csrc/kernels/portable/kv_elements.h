// How a pair of rows of a panel lies in KV memory, for each type of it: see kv.h.
//
// Each type says what a pair takes (kPairBytes), reads a part of its even or odd row as floats, and puts one number,
// which is finite and at most kLargest in magnitude, at place t of one of the rows. Where kIsScaled, numbers are
// integers with a scale for each 32 columns of a token.
#pragma once

#include "kernels/attention.h"
#include "kernels/portable/simd.h"
#include "types.h"

namespace pelton::PELTON_ISA {

constexpr float kLargestBFloat16 = 3.38953139e38f;

struct Float32 {
    static constexpr bool kIsScaled = false;
    static constexpr size_t kPairBytes = 128;
    static constexpr float kLargest = kLargestBFloat16;
    static PELTON_INLINE VecF even(const uint8_t* pair, int part) { return load(pair + part * kLanes * 4); }
    static PELTON_INLINE VecF odd(const uint8_t* pair, int part) { return even(pair + 64, part); }
    static PELTON_INLINE void put(uint8_t* pair, size_t t, int member, float value) {
        store_as(pair + member * 64 + t * 4, value);
    }
};

struct BFloat16 {
    static constexpr bool kIsScaled = false;
    static constexpr size_t kPairBytes = 64;
    static constexpr float kLargest = kLargestBFloat16;
    static PELTON_INLINE VecF even(const uint8_t* pair, int part) {
        return bits<VecF>(load<VecI>(pair + part * kLanes * 4) << 16);
    }
    static PELTON_INLINE VecF odd(const uint8_t* pair, int part) {
        pair += part * kLanes * 4;
#if defined(__AVX2__) && !defined(__AVX512F__)
        // As an operand in memory: the mask would take the one register that a full tile lacks.
        static const VecU mask = VecU{} + 0xffff0000u;
        VecF value;
        asm("vpand %1, %2, %0" : "=x"(value) : "m"(mask), "x"(load(pair)));
        return value;
#else
        return bits<VecF>(load<VecU>(pair) & 0xffff0000u);
#endif
    }
    static PELTON_INLINE void put(uint8_t* pair, size_t t, int member, float value) {
        const uint32_t word = bits<uint32_t>(value);
        store_as(pair + t * 4 + member * 2, static_cast<uint16_t>((word + 0x7fff + (word >> 16 & 1)) >> 16));
    }
};

struct Float16 {
    static constexpr bool kIsScaled = false;
    static constexpr size_t kPairBytes = 64;
    static constexpr float kLargest = 65504.0f;
    static PELTON_INLINE VecF even(const uint8_t* pair, int part) {
        pair += part * kLanes * 2;
#if defined(__AVX512F__)
        return _mm512_cvtph_ps(load<__m256i>(pair));
#elif defined(__F16C__)
        return _mm256_cvtph_ps(load<__m128i>(pair));
#else
        using Halves = uint16_t __attribute__((vector_size(kLanes * 2)));
        const VecU half = __builtin_convertvector(load<Halves>(pair), VecU), magnitude = (half & 0x7fffu) << 13;
        // A subnormal half gets the exponent of 2^-14 and loses that again: no subnormal float enters an operation.
        const VecU is_small = bits<VecU>(magnitude < 0x00800000u);
        const VecF biased = bits<VecF>(magnitude + (112u << 23) + (is_small & 0x00800000u));
        const VecF value = biased - bits<VecF>(is_small & 0x38800000u);
        return bits<VecF>(bits<VecU>(value) | (half & 0x8000u) << 16);
#endif
    }
    static PELTON_INLINE VecF odd(const uint8_t* pair, int part) { return even(pair + 32, part); }
    static PELTON_INLINE void put(uint8_t* pair, size_t t, int member, float value) {
        store_as(pair + member * 32 + t * 2, float_to_half(value));
    }
};

struct Int8 {
    static constexpr bool kIsScaled = true;
    static constexpr size_t kPairBytes = 32;
    static constexpr float kLargest = kLargestBFloat16;
    static PELTON_INLINE VecF even(const uint8_t* pair, int part) {
        pair += part * kLanes;
#if defined(__AVX512F__)
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(pair)));
#elif defined(__AVX2__)
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(pair))));
#else
        using Bytes = int8_t __attribute__((vector_size(kLanes)));
        return __builtin_convertvector(__builtin_convertvector(load<Bytes>(pair), VecI), VecF);
#endif
    }
    static PELTON_INLINE VecF odd(const uint8_t* pair, int part) { return even(pair + 16, part); }
    static PELTON_INLINE void put(uint8_t* pair, size_t t, int member, int8_t value) {
        store_as(pair + member * 16 + t, value);
    }
};

// Up to 32 columns of one token as integers: see quantize_activations in ops/numerics.py.
struct Quantised {
    int8_t values[kScaleColumns];
    float scale;

    // Numbers that are finite.
    Quantised(const float* from, int count) {
        float largest = 0.0f;
        for (int i = 0; i < count; i++) largest = __builtin_fmaxf(largest, __builtin_fabsf(from[i]));
        const bool is_zero = largest < 0x1p-100f;
        const float inverse = is_zero ? 0.0f : 127.0f / largest;
        scale = is_zero ? 0.0f : largest / 127.0f;
        // The sum's low bits are the nearest integer, ties to even.
        for (int i = 0; i < count; i++)
            values[i] = static_cast<int8_t>(bits<uint32_t>(from[i] * inverse + 0x1.8p23f) & 0xff);
    }
};

// Where a panel's line of index i begins, in bytes.
template <class Element>
PELTON_INLINE size_t line_of(size_t i) {
    return i / 2 * Element::kPairBytes;
}

// Bytes of the scales of some tokens, `width` columns of each.
template <class Element>
PELTON_INLINE size_t scale_bytes(int num_tokens, int width) {
    return Element::kIsScaled ? static_cast<size_t>(num_tokens * num_scales(width)) * sizeof(float) : 0;
}

// Of one panel of keys.
template <class Element>
PELTON_INLINE size_t key_panel_bytes(int head_dim) {
    return scale_bytes<Element>(kGroup, head_dim) + line_of<Element>(static_cast<size_t>(head_dim));
}

}  // namespace pelton::PELTON_ISA
