// dot.h for any CPU, in the compiler's vector types: four rows at a time. Included by kernels/portable/dot.h.
#pragma once

namespace pelton::PELTON_ISA {

using Bytes = uint8_t __attribute__((vector_size(16)));
using Words = uint16_t __attribute__((vector_size(16)));
using Shorts = int16_t __attribute__((vector_size(16)));
using Doubles = double __attribute__((vector_size(32)));
using Longs = int64_t __attribute__((vector_size(32)));

PELTON_INLINE Bytes load_bytes(const uint8_t* p) { return load_as<Bytes>(p); }
PELTON_INLINE Bytes and_mask(Bytes a, uint8_t mask) { return a & mask; }
// Shifts by a constant number of bits, towards the high end if positive; bits cross bytes: mask afterwards.
template <int kBits>
PELTON_INLINE Bytes shift(Bytes a) {
    if constexpr (kBits >= 0)
        return (Bytes)((Words)a << kBits);
    else
        return (Bytes)((Words)a >> -kBits);
}

// A fused multiply-add without the instruction. The product is exact in double; the sum is rounded to odd (its
// error is known exactly, by Knuth's two-sum), after which rounding to float32 is the one rounding that counts
// (Boldo and Melquiond, Emulation of a FMA and correctly rounded sums, 2008).
PELTON_INLINE VecF fused(VecF a, VecF b, VecF c) {
    const Doubles product = __builtin_convertvector(a, Doubles) * __builtin_convertvector(b, Doubles);
    const Doubles addend = __builtin_convertvector(c, Doubles);
    const Doubles sum = product + addend, rest = sum - product;
    const Doubles error = (product - (sum - rest)) + (addend - rest);
    const Longs sum_bits = (Longs)sum;
    const Longs inexact = (error > 0) | (error < 0), outward = (error > 0) == (sum > 0);
    const Longs step = (outward & 1) | (~outward & -1);
    const Longs even = -(~sum_bits & 1);
    return __builtin_convertvector((Doubles)(sum_bits + (step & even & inexact)), VecF);
}
PELTON_INLINE VecF to_float(VecI a) { return __builtin_convertvector(a, VecF); }
PELTON_INLINE VecI load_u8(const uint8_t* p) { return VecI{p[0], p[1], p[2], p[3]}; }
PELTON_INLINE VecI load_s8(const uint8_t* p) { return VecI{(int8_t)p[0], (int8_t)p[1], (int8_t)p[2], (int8_t)p[3]}; }
PELTON_INLINE VecF load_half(const void* p) {
    const uint16_t* h = (const uint16_t*)p;
    return VecF{half_to_float(h[0]), half_to_float(h[1]), half_to_float(h[2]), half_to_float(h[3])};
}
PELTON_INLINE VecF load_bf16(const void* p) {
    const uint16_t* h = (const uint16_t*)p;
    return VecF{bf16_to_float(h[0]), bf16_to_float(h[1]), bf16_to_float(h[2]), bf16_to_float(h[3])};
}

// Columns (0, 2) and (1, 3) of x as pairs of 16 bits: what the even and odd bytes of the weights meet.
struct Columns {
    Shorts even, odd;
};
PELTON_INLINE Shorts splat_pair(int8_t a, int8_t b) {
    return (Shorts)splat((int32_t)((uint32_t)(uint16_t)a | (uint32_t)b << 16));
}
PELTON_INLINE Columns four_columns(const int8_t* x) { return {splat_pair(x[0], x[2]), splat_pair(x[1], x[3])}; }
PELTON_INLINE VecI sum_pairs(Shorts a) { return ((VecI)a << 16 >> 16) + ((VecI)a >> 16); }

template <int kSafe, int kGroups>
PELTON_INLINE VecI sum_groups(const Bytes* w, const int8_t* x) {
    VecI total{};
    for (int i = 0; i < kGroups; i += kSafe) {
        Shorts part{};
        for (int j = i; j < i + kSafe; j++) {
            const Columns columns = four_columns(x + 4 * j);
            part += (Shorts)((Words)w[j] & 0xff) * columns.even + (Shorts)((Words)w[j] >> 8) * columns.odd;
        }
        total += sum_pairs(part);
    }
    return total;
}

// sum of w[k] x[k] over 32 columns, exact. kSafe is how many products of four columns fit 16 bits together:
// 8 for weights up to 15, 4 up to 31, 2 up to 63.
template <int kSafe>
PELTON_INLINE VecI dot(const Bytes (&w)[8], const int8_t* x) {
    return sum_groups<kSafe, 8>(w, x);
}

// Integer scales of kLanes rows for the first and the second half of a block.
struct Pairs {
    VecI a, b;
};
PELTON_INLINE Pairs pairs(VecI a, VecI b) { return {a, b}; }
// a * first half's sum of x + b * second half's
PELTON_INLINE VecI dot_halves(Pairs p, const int16_t (&half_sums)[2]) {
    return p.a * half_sums[0] + p.b * half_sums[1];
}

// The same with an integer scale (8 bits) for the block, or for each half of it.
using Scale = VecI;
PELTON_INLINE Scale scale_of(VecI a) { return a; }
template <int kSafe>
PELTON_INLINE VecI dot(const Bytes (&w)[8], const int8_t* x, Scale scale) {
    return sum_groups<kSafe, 8>(w, x) * scale;
}
template <int kSafe>
PELTON_INLINE VecI dot(const Bytes (&w)[8], const int8_t* x, Scale first, Scale second) {
    return sum_groups<kSafe, 4>(w, x) * first + sum_groups<kSafe, 4>(w + 4, x + 16) * second;
}

// Signed weights: |w| x <= 128 * 127 * 2 for two columns, which fits 16 bits.
struct SignedBytes {
    Bytes value;
};
PELTON_INLINE SignedBytes load_signed(const uint8_t* p) { return {load_bytes(p)}; }
PELTON_INLINE VecI dot(const SignedBytes (&w)[8], const int8_t* x, int32_t) {
    VecI total{};
    for (int i = 0; i < 8; i++) {
        const Columns columns = four_columns(x + 4 * i);
        const Shorts words = (Shorts)w[i].value;
        total += sum_pairs((words << 8 >> 8) * columns.even + (words >> 8) * columns.odd);
    }
    return total;
}
PELTON_INLINE VecI dot(const SignedBytes (&w)[8], const int8_t* x, int32_t minus_sum8, Scale scale) {
    return dot(w, x, minus_sum8) * scale;
}

// Sixteen signed values, and those that codes (0..15) stand for.
using Table = const int8_t*;
PELTON_INLINE Table load_table(const int8_t (&values)[16]) { return values; }
PELTON_INLINE SignedBytes look_up(Table table, Bytes codes) {
    Bytes values{};
    for (int i = 0; i < (int)sizeof values; i++) values[i] = (uint8_t)table[codes[i]];
    return {values};
}

}  // namespace pelton::PELTON_ISA
