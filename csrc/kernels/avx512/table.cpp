// The kernel table of the avx512 instruction set.
#include "kernels/table.h"

namespace pelton::avx512 {

static const LinearKernel* linear(WeightType) { return nullptr; }

const KernelTable* kernel_table() {
    static constexpr KernelTable table = {"avx512", {{}, linear}, attention_kernels, &row_kernels};
    return &table;
}

}  // namespace pelton::avx512
