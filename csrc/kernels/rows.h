// rows.h: ops that work row by row: one function pointer each, one table per instruction set.
//
// A row's result depends on that row alone: sums run in sixteen fixed lanes that are folded in one fixed tree, and a
// value's place in its row never shows.
#pragma once

#include <cstdint>

namespace pelton {

// In the order of Activation in ops/spec.py.
enum class Activation : int { Silu, GeluTanh, Gelu, Relu, Sigmoid, Softplus };

struct RowKernels {
    // out = x / sqrt(mean(x^2) + eps) * weight over each of `groups` runs of `width` values; weight may be null.
    void (*rms_norm)(const float* x, const float* weight, int width, int groups, float eps, float* out);
    // out = (x - mean) / sqrt(variance + eps) * weight + bias; bias may be null.
    void (*layer_norm)(const float* x, const float* weight, const float* bias, int width, float eps, float* out);
    // Rotates the first `dim` values of each head by angles = cos[dim/2], sin[dim/2]; pairs are (i, i + dim/2).
    void (*rope)(const float* x, const float* angles, int num_heads, int head_dim, int dim, float* out);
    void (*add)(const float* x, const float* y, int n, float* out);
    void (*mul)(const float* x, const float* y, int n, float* out);
    void (*scale)(const float* x, float factor, int n, float* out);
    void (*act)(Activation kind, const float* x, int n, float* out);
    void (*glu)(Activation kind, const float* gate, const float* up, int n, float* out);
    // out = cap * tanh(x / cap)
    void (*softcap)(const float* x, float cap, int n, float* out);
};

}  // namespace pelton

#ifdef PELTON_ISA  // the table that this unit's instruction set has: kernels/portable/rows.cpp
namespace pelton::PELTON_ISA {
extern const RowKernels row_kernels;
}
#endif
