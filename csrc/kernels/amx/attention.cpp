// Attention over paged keys and values on tile registers: 32 rows at a time, and whole blocks of 32 tokens. A cache in
// float32, which is kept for its precision, is multiplied on vectors.
//
// An output's sums take the columns, or the tokens, in ascending order, 32 at a time, high and low parts after each
// other; a token that a row does not see adds zero. So a result depends on its own row alone (tiles.h).
#include "kernels/attention.h"

#include "kernels/amx/attention_operands.h"
#include "kernels/portable/vector_attention.h"

namespace pelton::amx {
namespace {

// A line more than a row's scores: rows that lie 1 KiB apart would share a few places of the L1 cache.
constexpr size_t kRowFloats = kPieceTokens + 16;

// The scores of a row, and in place of each 32 of them their weights: 64 bytes of high parts, 64 of low ones.
struct alignas(64) Scores {
    float of[2 * kRows][kRowFloats];
};

// A step's rows: the high parts of the two row tiles, with `stride` bytes from one row to the next, and how many bytes
// after them the low parts are.
struct RowOperand {
    const uint8_t *first, *second;
    size_t low, stride;
};

// Computes `num_sums` products of num_steps steps each. rows(step) is the row operand; columns(sum, step, c, to) reads
// column tile c; write(sum) finds the result in the sum registers. Columns are read one step ahead, beside products.
template <class Element, int kRowTiles, int kColumnTiles, class RowsOf, class Columns, class Write>
PELTON_INLINE void multiply(int num_sums, int num_steps, const RowsOf& rows, const Columns& columns,
                            const Write& write) {
    using Registers = Sums<kRowTiles, kColumnTiles>;
    Operands<Element> slots[2];
    if (num_sums > 0 && num_steps > 0)
        for (int c = 0; c < kColumnTiles; c++) columns(0, 0, c, slots[0]);
    const auto nothing = [](int) {};
    for (int sum = 0, slot = 0; sum < num_sums; sum++) {
        Registers::zero();
        for (int step = 0; step < num_steps; step++, slot ^= 1) {
            const bool is_last = step + 1 == num_steps;
            const int next_sum = is_last ? sum + 1 : sum, next_step = is_last ? 0 : step + 1;
            const auto ahead = [&](int c) __attribute__((always_inline)) {
                if (next_sum < num_sums) columns(next_sum, next_step, c, slots[slot ^ 1]);
            };
            const RowOperand row = rows(step);
            const uint8_t *high[2] = {row.first, row.second}, *low[2] = {row.first + row.low, row.second + row.low};
            const Operands<Element>& column = slots[slot];
            Registers::add_step(high, column.high, ahead, row.stride);
            Registers::add_step(low, column.high, nothing, row.stride);
            if constexpr (Operands<Element>::kHasLow) Registers::add_step(high, column.low, nothing, row.stride);
        }
        write(sum);
    }
}

// Up to 32 rows of a piece.
template <class Element, int kRowTiles>
class Tile {
  public:
    Tile(const AttendPiece& piece, int row, int num_rows, const AttendPartial& out)
        : piece_(piece),
          row_(row),
          num_rows_(num_rows),
          out_(out),
          num_steps_((piece.head_dim + kStepColumns - 1) / kStepColumns) {
        const Range panels = visible_panels(piece, row, num_rows);
        if (panels.begin < panels.end) {
            first_block_ = panels.begin / 2;
            num_blocks_ = (panels.end + 1) / 2 - first_block_;
        }
    }

    void run() {
        const TileRegisters registers(num_rows_ < kRows ? num_rows_ : kRows,
                                      kRowTiles == 2 ? num_rows_ - kRows : kRows);
        score();
        for (int r = 0; r < num_rows_; r++) weigh_row(r);
        const int num_panels = padded_value_dim(piece_.value_dim) / kGroup;
        for (int panel = 0; panel + 2 <= num_panels; panel += 2) sum_values<2>(panel);
        if (num_panels % 2) sum_values<1>(num_panels - 1);
    }

  private:
    Block<Element> block(int index) const {
        return {piece_.blocks[first_block_ + index], piece_.head_dim, piece_.value_dim};
    }
    // As many of the head's bytes as a column tile has: the first rows bring them into L2.
    void fetch(const uint8_t* from) const {
        if (row_ > 0) return;
        for (size_t i = 0; i < kPairs * Element::kPairBytes; i += kRowBytes) __builtin_prefetch(from + i, 0, 2);
    }

    // While keys are read, the values of the same block are brought near.
    void score() {
        const uint8_t* queries = piece_.queries;
        const auto rows = [&](int step) __attribute__((always_inline)) {
            const uint8_t* first = queries + QueryTiles::at(row_ / kRows, step, num_steps_);
            return RowOperand{first, first + QueryTiles::at(1, 0, num_steps_), kTileBytes, kRowBytes};
        };
        const size_t values = 2 * key_panel_bytes<Element>(piece_.head_dim);
        const auto columns = [&](int index, int step, int c, Operands<Element>& to) __attribute__((always_inline)) {
            const uint8_t* head = piece_.blocks[first_block_ + index];
            fetch(head + values + static_cast<size_t>(2 * step + c) * kPairs * Element::kPairBytes);
            block(index).read_keys(step, c, to);
        };
        multiply<Element, kRowTiles, 2>(num_blocks_, num_steps_, rows, columns, [&](int index) {
            Sums<kRowTiles, 2>::store_rows(scores_.of[0] + (first_block_ + index) * kBlockTokens, kRowFloats);
        });
    }

    void weigh_row(int r) {
        const int row = row_ + r;
        const Range panels = {2 * first_block_, 2 * (first_block_ + num_blocks_)};
        float* scores = scores_.of[r];
        soften(scores, visible(piece_, row), panels, piece_.softcap, out_.maximum + row, out_.sum + row);
        for (int i = panels.begin * kGroup; i < panels.end * kGroup; i += kBlockTokens) {
            uint8_t* to = reinterpret_cast<uint8_t*>(scores + i);
            put_row(load(scores + i), load(scores + i + kGroup), to, to + kRowBytes);
        }
    }

    // While values are read, the keys of the same place in the next piece are brought near.
    template <int kColumnTiles>
    void sum_values(int panel) {
        const size_t ld = static_cast<size_t>(padded_value_dim(piece_.value_dim));
        const auto rows = [&](int index) __attribute__((always_inline)) {
            const float* first = scores_.of[0] + (first_block_ + index) * kBlockTokens;
            return RowOperand{reinterpret_cast<const uint8_t*>(first),
                              reinterpret_cast<const uint8_t*>(first + kRows * kRowFloats), kRowBytes,
                              kRowFloats * sizeof(float)};
        };
        const auto columns = [&](int, int index, int c, Operands<Element>& to) __attribute__((always_inline)) {
            const uint8_t* next = piece_.next[first_block_ + index];
            if (next) fetch(next + static_cast<size_t>(panel + c) * kPairs * Element::kPairBytes);
            block(index).read_values(panel + c, c, to);
        };
        multiply<Element, kRowTiles, kColumnTiles>(1, num_blocks_, rows, columns, [&](int) {
            Sums<kRowTiles, kColumnTiles>::store_rows(out_.output + static_cast<size_t>(row_) * ld + panel * kGroup,
                                                      ld);
        });
    }

    const AttendPiece& piece_;
    const int row_, num_rows_;
    const AttendPartial& out_;
    const int num_steps_;
    int first_block_ = 0, num_blocks_ = 0;
    Scores scores_;
};

template <class Element>
void attend_piece(const AttendPiece& piece, const AttendPartial& out) {
    for (int row = 0; row < piece.num_rows; row += 2 * kRows) {
        const int left = piece.num_rows - row;
        if (left > kRows)
            Tile<Element, 2>(piece, row, left < 2 * kRows ? left : 2 * kRows, out).run();
        else
            Tile<Element, 1>(piece, row, left, out).run();
    }
}

template <class Element>
constexpr AttentionKernel tile_attention = {
    kMaxItemRows, store_token<Element>, QueryTiles::put, attend_piece<Element>, merge, finish};

}  // namespace

const AttentionKernel attention_kernels[kNumKVTypes] = {
    vector_attention<Float32>,
    tile_attention<BFloat16>,
    tile_attention<Float16>,
    tile_attention<Int8>,
};

}  // namespace pelton::amx
