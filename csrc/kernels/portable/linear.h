// linear.h: the linear kernels that every instruction set compiles from the same source.
#pragma once

#include "kernels/table.h"

namespace pelton::PELTON_ISA {

// Family::Float32: weights F32, F16 and BF16, widened exactly. out = fma over the columns, ascending, from zero.
size_t float32_bytes(int M, int K);
void float32_prepare(const float* x, size_t ldx, int m0, int m1, int M, int K, uint8_t* act);
constexpr ActivationKernel kFloat32Activations = {float32_bytes, float32_prepare};
const LinearKernel* float32_linear(WeightType type);

// Family::Int8: the block-quantised types.
size_t int8_bytes(int M, int K);
void int8_prepare(const float* x, size_t ldx, int m0, int m1, int M, int K, uint8_t* act);
constexpr ActivationKernel kInt8Activations = {int8_bytes, int8_prepare};
const LinearKernel* int8_linear(WeightType type);

}  // namespace pelton::PELTON_ISA
