// types.h: weight types by their GGML id, 16-bit floats, and the sizes of quantised blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace pelton {

// Ids as GGUF files store them; the same as formats/quants.py.
enum class WeightType : int {
    F32 = 0,
    F16 = 1,
    Q4_0 = 2,
    Q4_1 = 3,
    Q5_0 = 6,
    Q5_1 = 7,
    Q8_0 = 8,
    Q2_K = 10,
    Q3_K = 11,
    Q4_K = 12,
    Q5_K = 13,
    Q6_K = 14,
    BF16 = 30,
};

}  // namespace pelton
