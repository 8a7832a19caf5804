// The kernel table of the generic instruction set.
#include "kernels/table.h"

namespace pelton::generic {

static const LinearKernel* linear(WeightType) { return nullptr; }

const KernelTable* kernel_table() {
    static constexpr KernelTable table = {"generic", {{}, linear}, attention_kernels, &row_kernels};
    return &table;
}

}  // namespace pelton::generic
