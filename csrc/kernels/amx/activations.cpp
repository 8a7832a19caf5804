// Activations of the BFloat16 family: scaled, rounded to nearest even, in the order of row tiles.
#include "kernels/amx/activations.h"

#include <immintrin.h>

#include "kernels/amx/linear.h"

namespace pelton::amx {
namespace {

__m512i round_step(const float* x, int num_columns) {
    const auto lanes = [](int count) {
        return count >= 16 ? __mmask16{0xffff} : static_cast<__mmask16>((1u << (count > 0 ? count : 0)) - 1);
    };
    const __m512 scale = _mm512_set1_ps(kActivationScale);
    const __m512 low = _mm512_mul_ps(scale, _mm512_maskz_loadu_ps(lanes(num_columns), x));
    const __m512 high = _mm512_mul_ps(scale, _mm512_maskz_loadu_ps(lanes(num_columns - 16), x + 16));
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

}  // namespace

size_t bf16_bytes(int M, int K) {
    return static_cast<size_t>(M) * static_cast<size_t>(num_steps(K)) * kRowBytes + kTileBytes;
}

void bf16_prepare(const float* x, size_t ldx, int m0, int m1, int M, int K, uint8_t* act) {
    const Activations layout{act, M, num_steps(K)};
    for (int m = m0; m < m1; m++) {
        uint8_t* to = act + layout.offset(m / kRows, 0) + static_cast<size_t>(m % kRows) * kRowBytes;
        const float* from = x + static_cast<size_t>(m) * ldx;
        for (int k = 0; k < K; k += kStepColumns, to += layout.step_bytes(m / kRows))
            _mm512_storeu_si512(to, round_step(from + k, K - k));
    }
    if (m1 == M) __builtin_memset(act + bf16_bytes(M, K) - kTileBytes, 0, kTileBytes);
}

}  // namespace pelton::amx
