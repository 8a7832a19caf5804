// limits.h: what a CPU can do at most, for measurements that report a kernel's share of it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pelton {

struct LimitKernels {
    // Reads memory once, front to end; the checksum keeps the reads alive. `bytes` is a multiple of 256.
    uint32_t (*read)(const uint8_t* data, size_t bytes);
    // num_dots times 16 weight rows x 32 columns of the exact integer dot that the Int8 kernels are built on, with
    // four-bit weights in registers and activations in L1: 2 x 16 x 32 operations each. Returns their sum.
    int32_t (*int8_dots)(int num_dots);
    // num_columns times 16 weight rows x 4 activation rows of fused multiply-adds in registers: 2 x 64 operations each.
    float (*float_products)(int num_columns);
};

}  // namespace pelton

#ifdef PELTON_ISA  // kernels/portable/limits.cpp
namespace pelton::PELTON_ISA {
extern const LimitKernels limit_kernels;
}
#endif
