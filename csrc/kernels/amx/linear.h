// linear.h: the linear kernels of the BFloat16 family.
#pragma once

#include "kernels/table.h"

namespace pelton::amx {

size_t bf16_bytes(int M, int K);
void bf16_prepare(const float* x, size_t ldx, int m0, int m1, int M, int K, uint8_t* act);
constexpr ActivationKernel kBFloat16Activations = {bf16_bytes, bf16_prepare};

// Every block-quantised type, F16 and BF16; nullptr for others.
const LinearKernel* bf16_linear(WeightType type);

// The `bf16_products` of KernelTable.
float bf16_products(int num_steps);

}  // namespace pelton::amx
