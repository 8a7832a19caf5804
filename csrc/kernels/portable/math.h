// math.h: elementary functions on vectors of float32. Every lane is computed alone and in the same way, so a
// value does not depend on its place in a row, on the width of the vector or on what stands beside it.
#pragma once

#include "kernels/portable/simd.h"

namespace pelton::PELTON_ISA {

// e^x to within 1 ulp. Results below the smallest normal float are 0 (so -inf gives 0), results beyond the
// largest are +inf, NaN stays NaN, and exp(0) is exactly 1.
// x = n ln2 + r with |r| <= ln2 / 2; e^r = 1 + r + r^2 q(r), q of degree 4 fitted for the least relative error
// (3.1e-9); 2^n is added to the exponent bits.
PELTON_INLINE VecF exp(VecF x) {
    constexpr float kLowest = -87.33654f, kHighest = 88.72283f;
    const VecF round_to_int = splat(12582912.0f);  // 1.5 * 2^23: adding it leaves an integer in the low bits
    const VecF clamped = min(splat(kHighest), max(splat(kLowest), x));
    const VecF shifted = fma(clamped, splat(1.44269504f), round_to_int);
    const VecF n = shifted - round_to_int;
    VecF r = fma(n, splat(-0.693359375f), clamped);
    r = fma(n, splat(2.12194440e-4f), r);
    VecF q = fma(splat(1.38145995e-3f), r, splat(8.36871704e-3f));
    q = fma(q, r, splat(4.16683916e-2f));
    q = fma(q, r, splat(1.66665211e-1f));
    q = fma(q, r, splat(4.99999935e-1f));
    const VecF power = fma(q, r * r, r) + 1.0f;
    VecF result = bits<VecF>(bits<VecI>(power) + (bits<VecI>(shifted) << 23));
    result = x <= kHighest ? result : x * 1e38f;  // +inf or NaN
    return x < kLowest ? splat(0.0f) : result;
}

// tanh x to within 2 ulp: below 0.625 an odd polynomial of degree 11 (relative error 4.4e-9), above
// 1 - 2 / (e^2x + 1).
PELTON_INLINE VecF tanh(VecF x) {
    const VecF size = abs(x), square = x * x;
    VecF p = fma(splat(-5.70498733e-3f), square, splat(2.06390880e-2f));
    p = fma(p, square, splat(-5.37397154e-2f));
    p = fma(p, square, splat(1.33314416e-1f));
    p = fma(p, square, splat(-3.33332807e-1f));
    const VecF small = fma(p * square, x, x);
    const VecF large = 1.0f - 2.0f / (exp(size + size) + 1.0f);
    const VecF signed_large = bits<VecF>(bits<VecI>(large) | (bits<VecI>(x) & INT32_MIN));
    return size < 0.625f ? small : signed_large;
}

}  // namespace pelton::PELTON_ISA
