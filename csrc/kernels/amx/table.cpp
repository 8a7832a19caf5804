// The kernel table of the amx instruction set.
#include "kernels/table.h"

namespace pelton::amx {

static const LinearKernel* linear(WeightType) { return nullptr; }

const KernelTable* kernel_table() {
    static constexpr KernelTable table = {"amx", {{}, linear}, attention_kernels, &row_kernels, &sample_kernels};
    return &table;
}

}  // namespace pelton::amx
