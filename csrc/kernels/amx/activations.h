// activations.h: activations of the BFloat16 family as `prepare` leaves them in memory.
//
// Rows stand in row tiles of sixteen; the last has what is left. A row tile holds, for each step of 32 columns, its
// rows of 64 bytes after each other, so that one row alone is one stream. Values are 2^48 times what they were
// (weights.h), rounded to bf16: from 2^80 on infinite. After the last row tile comes one operand
// tile of zeros: a product may load sixteen rows where fewer are left, and ignore what comes of them.
#pragma once

#include "kernels/amx/weights.h"

namespace pelton::amx {

struct Activations {
    const uint8_t* data;
    int num_rows, steps;

    int row_tiles() const { return (num_rows + kRows - 1) / kRows; }
    int rows(int row_tile) const {
        const int left = num_rows - row_tile * kRows;
        return left < kRows ? left : kRows;
    }
    size_t step_bytes(int row_tile) const { return static_cast<size_t>(rows(row_tile)) * kRowBytes; }
    size_t offset(int row_tile, int step) const {
        return static_cast<size_t>(row_tile) * static_cast<size_t>(steps) * kTileBytes +
               static_cast<size_t>(step) * step_bytes(row_tile);
    }
    const uint8_t* operand(int row_tile, int step) const { return data + offset(row_tile, step); }
};

}  // namespace pelton::amx
