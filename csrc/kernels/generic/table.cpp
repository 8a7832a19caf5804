// The kernel table of the generic instruction set.
#include "kernels/table.h"

#include "kernels/portable/linear.h"

namespace pelton::generic {

static const LinearKernel* linear(WeightType type) {
    const LinearKernel* quantised = int8_linear(type);
    return quantised ? quantised : float32_linear(type);
}

const KernelTable* kernel_table() {
    static constexpr KernelTable table = {"generic",         {{kFloat32Activations, kInt8Activations, {}}, linear},
                                          attention_kernels, &row_kernels,
                                          &sample_kernels,   &limit_kernels};
    return &table;
}

}  // namespace pelton::generic
