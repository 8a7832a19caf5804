// The kernel table of the avx512 instruction set.
#include "kernels/table.h"

#include "kernels/portable/linear.h"

namespace pelton::avx512 {

static const LinearKernel* linear(WeightType type) {
    const LinearKernel* quantised = int8_linear(type);
    return quantised ? quantised : float32_linear(type);
}

const KernelTable* kernel_table() {
    static constexpr KernelTable table = {"avx512",          {{kFloat32Activations, kInt8Activations, {}}, linear},
                                          attention_kernels, &row_kernels,
                                          &sample_kernels,   &limit_kernels};
    return &table;
}

}  // namespace pelton::avx512
