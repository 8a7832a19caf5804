// The kernel table of the avx2 instruction set.
#include "kernels/table.h"

namespace pelton::avx2 {

static const LinearKernel* linear(WeightType) { return nullptr; }

const KernelTable* kernel_table() {
    static constexpr KernelTable table = {"avx2", {{}, linear}, attention_kernels, &row_kernels};
    return &table;
}

}  // namespace pelton::avx2
