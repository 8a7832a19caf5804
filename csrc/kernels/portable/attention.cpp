// Attention over paged keys and values on vectors: the table of the instruction sets without tiles.
#include "kernels/attention.h"

#include "kernels/portable/vector_attention.h"

namespace pelton::PELTON_ISA {

const AttentionKernel attention_kernels[kNumKVTypes] = {
    vector_attention<Float32>,
    vector_attention<BFloat16>,
    vector_attention<Float16>,
    vector_attention<Int8>,
};

}  // namespace pelton::PELTON_ISA
