// int8_activations.h: activations of the Int8 family as `prepare` leaves them in memory.
//
// Rows stand in panels of kPanelRows (the last one has what is left). A panel holds, for each block of 32 columns
// ascending: rows x 32 bytes of int8, then rows x BlockInfo. So a kernel walks a panel from front to end.
#pragma once

#include "types.h"

namespace pelton::PELTON_ISA {

constexpr int kPanelRows = 32;
constexpr int kBlock = 32;  // columns

// What goes with 32 int8 values q of one row: x[k] is about scale * q[k].
struct BlockInfo {
    float scale;         // largest |x| / 127; 0 for a block of zeros; NaN if the block holds NaN or infinity
    float scaled_sum;    // scale * sum(q)
    int32_t minus_sum8;  // -8 * sum(q)
    int16_t half_sums[2];
};
static_assert(sizeof(BlockInfo) == 16);

constexpr size_t kRowBlockBytes = kBlock + sizeof(BlockInfo);

// One block of columns of one panel.
struct ActivationBlock {
    const int8_t* values;
    const BlockInfo* info;
};

struct Activations {
    const uint8_t* data;
    int num_rows, num_blocks;

    int panel_rows(int panel) const {
        const int rest = num_rows - panel * kPanelRows;
        return rest < kPanelRows ? rest : kPanelRows;
    }
    ActivationBlock block(int panel, int b) const {
        const size_t rows = (size_t)panel_rows(panel);
        const uint8_t* start =
            data + ((size_t)panel * kPanelRows * (size_t)num_blocks + rows * (size_t)b) * kRowBlockBytes;
        return {(const int8_t*)start, (const BlockInfo*)(start + rows * kBlock)};
    }
};

}  // namespace pelton::PELTON_ISA
