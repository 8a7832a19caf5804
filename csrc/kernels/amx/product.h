// product.h: products of row tiles and column tiles over some steps, and what they leave behind.
//
// The sums of an output take the steps of its row in ascending order, one after the other, wherever they wait in
// between: the same bits for every number of rows and every blocking.
#pragma once

#include "kernels/amx/activations.h"

namespace pelton::amx {

constexpr int kSumFloats = kRows * kRows;

struct Output {
    float* data;
    size_t stride;
};

// A pass: at most two row tiles that meet the same weights.
struct Pass {
    int first, count;  // row tiles
};
constexpr int kPassTiles = 2;
inline int num_passes(const Activations& x) { return (x.row_tiles() + kPassTiles - 1) / kPassTiles; }
inline Pass pass_of(const Activations& x, int pass) {
    const int first = pass * kPassTiles, left = x.row_tiles() - first;
    return {first, left < kPassTiles ? left : kPassTiles};
}

// Adds steps [step0, step0 + count) to the sum registers; column tile c's operand of step step0 + i is
// columns[c] + i * kTileElements. After each column tile's products `then(c, i)` runs: other work, to fill the wait.
template <int kRowTiles, int kColumnTiles, class Then>
[[gnu::always_inline]] inline void add_steps(const Activations& x, int first_row_tile, int step0, int count,
                                             const uint16_t* const* columns, const Then& then) {
    const uint8_t* rows[kRowTiles];
    size_t row_step[kRowTiles];
    for (int r = 0; r < kRowTiles; r++) {
        rows[r] = x.operand(first_row_tile + r, step0);
        row_step[r] = x.step_bytes(first_row_tile + r);
    }
    const uint16_t* operands[kColumnTiles];
    for (int c = 0; c < kColumnTiles; c++) operands[c] = columns[c];
    for (int i = 0; i < count; i++) {
        Sums<kRowTiles, kColumnTiles>::add_step(rows, operands, [&](int c) { then(c, i); });
        for (int r = 0; r < kRowTiles; r++) rows[r] += row_step[r];
        for (int c = 0; c < kColumnTiles; c++) operands[c] += kTileElements;
    }
}

// Writes stored sums of a pass, times the scales of the weights' rows (weights[c] is where column tile c begins), to
// the output, whose column tile `tile` is the first of kColumnTiles.
template <int kColumnTiles>
inline void write_sums(const Activations& x, Pass pass, const float* sums, const uint8_t* const* weights, int tile,
                       Output out) {
    __m512 scales[kColumnTiles];
    for (int c = 0; c < kColumnTiles; c++) scales[c] = _mm512_loadu_ps(weights[c]);
    for (int r = 0; r < pass.count; r++)
        for (int m = 0; m < x.rows(pass.first + r); m++) {
            float* to = out.data + static_cast<size_t>((pass.first + r) * kRows + m) * out.stride + tile * kRows;
            for (int c = 0; c < kColumnTiles; c++)
                _mm512_storeu_ps(
                    to + kRows * c,
                    _mm512_mul_ps(scales[c], _mm512_loadu_ps(sums + (2 * r + c) * kSumFloats + kRows * m)));
        }
}

}  // namespace pelton::amx
