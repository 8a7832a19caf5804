// tiles.h: what the BFloat16 family computes, from its definition.
#pragma once

#include "selftest.h"

namespace selftest {

// A weight's row: the operands of its tile products, and the scale of its sums. A weight is
// operand * scale * 2^48.
struct TileRow {
    std::vector<float> operands;
    float scale;
};
TileRow tile_row(pelton::WeightType type, const uint8_t* row, int K);

// The product with activations x, as many as the row has operands.
float tile_product(const float* x, const TileRow& row);

}  // namespace selftest
