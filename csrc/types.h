// types.h: weight types by their GGML id, 16-bit floats, and the sizes of quantised blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace pelton {

// Ids as GGUF files store them; the same as formats/quants.py.
enum class WeightType : int {
    F32 = 0,
    F16 = 1,
    Q4_0 = 2,
    Q4_1 = 3,
    Q5_0 = 6,
    Q5_1 = 7,
    Q8_0 = 8,
    Q2_K = 10,
    Q3_K = 11,
    Q4_K = 12,
    Q5_K = 13,
    Q6_K = 14,
    IQ4_NL = 20,
    IQ4_XS = 23,
    BF16 = 30,
};

// Functions of headers that units of several instruction sets include are `static`: with external linkage the
// linker would keep one copy, perhaps one with instructions that this CPU lacks.
template <class T>
static inline T load_as(const void* p) {
    T value;
    __builtin_memcpy(&value, p, sizeof value);
    return value;
}

template <class T>
static inline void store_as(void* p, T value) {
    __builtin_memcpy(p, &value, sizeof value);
}

// Exact: every IEEE binary16 value is a float32.
static inline float half_to_float(uint16_t half) {
    const uint32_t sign = uint32_t{half & 0x8000u} << 16, rest = half & 0x7fffu;
    const uint32_t shifted = rest << 13;
    const float finite = __builtin_bit_cast(float, shifted) * 0x1p112f;  // exponent bias 127 - 15
    const uint32_t bits = rest >= 0x7c00 ? shifted | 0x7f800000u : __builtin_bit_cast(uint32_t, finite);
    return __builtin_bit_cast(float, bits | sign);
}

// The nearest half, ties to even, of a number that one can hold: up to 65504 in magnitude.
static inline uint16_t float_to_half(float x) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, x), magnitude = bits & 0x7fffffffu;
    uint32_t half;
    if (magnitude < 0x38800000u) {  // 2^-14: below, halves are multiples of 2^-24, as floats from 0.5 to 1 are
        const float sum = __builtin_bit_cast(float, magnitude) + 0.5f;
        half = __builtin_bit_cast(uint32_t, sum) - 0x3f000000u;
    } else {
        half = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;  // exponent bias 127 - 15
    }
    return static_cast<uint16_t>(half | (bits >> 16 & 0x8000u));
}

static inline float bf16_to_float(uint16_t value) { return __builtin_bit_cast(float, uint32_t{value} << 16); }

}  // namespace pelton
