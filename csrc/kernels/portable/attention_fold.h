// attention_fold.h: what came of a row's pieces becomes its result.
#pragma once

#include "kernels/attention.h"
#include "kernels/portable/math.h"

namespace pelton::PELTON_ISA {

// (M, L, O) <- with m = max(M, M'), a = exp(M - m), b = exp(M' - m): (m, a L + b L', a O + b O').
inline void merge(int num_rows, int value_dim, const AttendPartial& into, const AttendPartial& from) {
    const int width = padded_value_dim(value_dim);
    for (int r = 0; r < num_rows; r++) {
        if (from.sum[r] == 0) continue;  // this row sees nothing of that piece
        const float both = into.maximum[r] > from.maximum[r] ? into.maximum[r] : from.maximum[r];
        const VecF a = splat(exp(splat(into.maximum[r] - both))[0]);
        const VecF b = splat(exp(splat(from.maximum[r] - both))[0]);
        into.maximum[r] = both;
        into.sum[r] = fma(a[0], into.sum[r], b[0] * from.sum[r]);
        float* output = into.output + static_cast<size_t>(r) * width;
        const float* other = from.output + static_cast<size_t>(r) * width;
        for (int i = 0; i < width; i += kLanes) {
            store(output + i, fma(a, load(output + i), b * load(other + i)));
        }
    }
}

inline void finish(const AttendPartial& state, int row, int value_dim, float* out) {
    const float* output = state.output + static_cast<size_t>(row) * static_cast<size_t>(padded_value_dim(value_dim));
    const float scale = 1.0f / state.sum[row];
    for (int i = 0; i < value_dim; i++) out[i] = output[i] * scale;
}

}  // namespace pelton::PELTON_ISA
