// attention_operands.h: keys, values, queries and weights as operands of tile products.
//
// A number in float32 is the sum of two bf16 numbers to within 2^-17 of itself: the nearest one, its high part, and the
// one nearest to what that leaves, its low part. A product is then high x high + low x high + high x low. A binary16
// number is that sum exactly. A cache in bf16 has no low parts and lies in memory as tiles already.
#pragma once

#include "kernels/amx/tiles.h"
#include "kernels/portable/kv_elements.h"

namespace pelton::amx {

constexpr int kPairs = kStepColumns / 2;  // a tile's lines: pairs of columns of keys, or of tokens of values

// The two column tiles of a step, where they have low parts.
template <class Element>
struct Operands {
    static constexpr bool kHasLow = true;

    const uint16_t *high[2], *low[2];
    alignas(64) uint16_t memory[2][2][kTileElements];

    // Column tile c: line i of `count` holds the even and odd numbers pair(i, 0) and pair(i, 1) by turns; the lines
    // after them are zero.
    template <class Pair>
    PELTON_INLINE void split(int c, int count, const Pair& pair) {
        high[c] = memory[c][0];
        low[c] = memory[c][1];
        for (int i = 0; i < count; i++) {
            const VecF even = pair(i, 0), odd = pair(i, 1);
            const VecF high_even = nearest(even), high_odd = nearest(odd);
            put(memory[c][0], i, high_even, high_odd);
            put(memory[c][1], i, low_part(even - high_even), low_part(odd - high_odd));
        }
        for (int i = count; i < kPairs; i++) {
            put(memory[c][0], i, VecF{}, VecF{});
            put(memory[c][1], i, VecF{}, VecF{});
        }
    }

  private:
    static PELTON_INLINE VecU upper(VecF x) { return bits<VecU>(x) & 0xffff0000u; }
    static PELTON_INLINE VecF nearest(VecF x) { return bits<VecF>(upper(bits<VecF>(bits<VecU>(x) + 0x8000u))); }
    // A number that is not scaled leaves no more bits than there is room for.
    static PELTON_INLINE VecF low_part(VecF left) { return Element::kIsScaled ? nearest(left) : left; }
    static PELTON_INLINE void put(uint16_t* tile, int line, VecF even, VecF odd) {
        store(tile + 2 * kPairs * line, bits<VecU>(even) >> 16 | upper(odd));
    }
};
template <>
struct Operands<BFloat16> {
    static constexpr bool kHasLow = false;
    const uint16_t* high[2];
};

// What a block of one head holds, at its bytes.
template <class Element>
class Block {
  public:
    Block(const uint8_t* head, int head_dim, int value_dim)
        : keys_(head),
          values_(head + 2 * key_panel_bytes<Element>(head_dim)),
          head_dim_(head_dim),
          panel_bytes_(key_panel_bytes<Element>(head_dim)),
          values_begin_(scale_bytes<Element>(kBlockTokens, value_dim)) {}

    // Keys of the sixteen tokens of panel c, columns 32 step and on, and the values of all tokens, columns 16 panel and
    // on: as column tile c.
    PELTON_INLINE void read_keys(int step, int c, Operands<Element>& to) const {
        const uint8_t* panel = keys_ + static_cast<size_t>(c) * panel_bytes_;
        const uint8_t* lines = panel + scale_bytes<Element>(kGroup, head_dim_) + step * kStepBytes;
        const int left = (head_dim_ - step * kStepColumns) / 2;
        __m512 scales = {};
        if constexpr (Element::kIsScaled) scales = _mm512_loadu_ps(panel + step * kGroup * sizeof(float));
        read(lines, c, left < kPairs ? left : kPairs, to,
             [&](int, int) __attribute__((always_inline)) { return scales; });
    }
    PELTON_INLINE void read_values(int panel, int c, Operands<Element>& to) const {
        const size_t group = static_cast<size_t>(panel * kGroup / kScaleColumns);
        const float* scales = reinterpret_cast<const float*>(values_) + group * kBlockTokens;
        read(values_ + values_begin_ + panel * kStepBytes, c, kPairs, to,
             [&](int line, int member) __attribute__((always_inline)) { return splat(scales[2 * line + member]); });
    }

  private:
    // Of a whole tile of pairs.
    static constexpr size_t kStepBytes = kPairs * Element::kPairBytes;

    template <class Scale>
    PELTON_INLINE static void read(const uint8_t* lines, int c, int count, Operands<Element>& to, const Scale& scale) {
        if constexpr (!Operands<Element>::kHasLow) {
            // Past the last column lie other finite numbers of the block, which the zeros of the queries meet.
            to.high[c] = reinterpret_cast<const uint16_t*>(lines);
        } else {
            to.split(c, count, [&](int line, int member) __attribute__((always_inline)) {
                const uint8_t* pair = lines + static_cast<size_t>(line) * Element::kPairBytes;
                const VecF numbers = member ? Element::odd(pair, 0) : Element::even(pair, 0);
                if constexpr (Element::kIsScaled) return numbers * scale(line, member);
                return numbers;
            });
        }
    }

    const uint8_t *keys_, *values_;
    const int head_dim_;
    const size_t panel_bytes_, values_begin_;
};

// 32 numbers of a row as 64 bytes of high parts and 64 of low ones.
PELTON_INLINE void put_row(VecF first, VecF second, uint8_t* high, uint8_t* low) {
    const auto widen = [](__m256i words) { return bits<VecF>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16)); };
    const __m512i rounded = (__m512i)_mm512_cvtne2ps_pbh(second, first);
    store(high, rounded);
    store(low, _mm512_cvtne2ps_pbh(second - widen(_mm512_extracti64x4_epi64(rounded, 1)),
                                   first - widen(_mm512_castsi512_si256(rounded))));
}

// Queries: for each sixteen rows and each 32 columns a tile of high parts and one of low ones.
struct QueryTiles {
    static constexpr size_t kBytes = 2 * kTileBytes;

    static size_t at(int row_tile, int step, int num_steps) {
        return (static_cast<size_t>(row_tile) * static_cast<size_t>(num_steps) + static_cast<size_t>(step)) * kBytes;
    }
    static void put(const float* query, float scale, int row, int, int head_dim, uint8_t* queries) {
        const int num_steps = (head_dim + kStepColumns - 1) / kStepColumns;
        const auto part = [&](int column) {
            const int count = head_dim - column;
            const auto mask =
                count >= 16 ? __mmask16{0xffff} : static_cast<__mmask16>((1u << (count > 0 ? count : 0)) - 1);
            return _mm512_mul_ps(_mm512_set1_ps(scale), _mm512_maskz_loadu_ps(mask, query + column));
        };
        for (int step = 0; step < num_steps; step++) {
            uint8_t* to = queries + at(row / kRows, step, num_steps) + row % kRows * kRowBytes;
            put_row(part(step * kStepColumns), part(step * kStepColumns + kGroup), to, to + kTileBytes);
        }
    }
};

}  // namespace pelton::amx
