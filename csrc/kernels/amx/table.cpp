// The kernel table of the amx instruction set.
#include "kernels/table.h"

#include "kernels/amx/linear.h"
#include "kernels/portable/linear.h"

namespace pelton::amx {

static const LinearKernel* linear(WeightType type) {
    const LinearKernel* tiled = bf16_linear(type);
    return tiled ? tiled : float32_linear(type);
}

const KernelTable* kernel_table() {
    static constexpr KernelTable table = {"amx",
                                          {{kFloat32Activations, {}, kBFloat16Activations}, linear},
                                          attention_kernels,
                                          &row_kernels,
                                          &sample_kernels,
                                          &limit_kernels,
                                          bf16_products};
    return &table;
}

}  // namespace pelton::amx
