// vector_attention.h: one piece of 256 keys on vectors of float32.
//
// Both products (scores = q . keys, output = weights . values) are the same loop: a few rows of float32 times
// panels of sixteen columns, one chain of fused multiply-adds per result over an ascending index. So a result
// depends on nothing but its own row and column, whatever tile it was computed in.
#pragma once

#include "kernels/portable/attention_fold.h"
#include "kernels/portable/kv_elements.h"
#include "kernels/portable/kv_store.h"
#include "kernels/portable/softmax.h"

namespace pelton::PELTON_ISA {

constexpr size_t kLine = 64;  // bytes

// The rows of a tile, for which there are accumulators enough.
#if defined(__AVX512F__)
constexpr int kMaxRows = 12, kRegisters = 32;
#elif defined(__AVX2__)
constexpr int kMaxRows = 6, kRegisters = 16;
#elif defined(__aarch64__)
constexpr int kMaxRows = 6, kRegisters = 32;
#else
constexpr int kMaxRows = 3, kRegisters = 16;
#endif
constexpr int kMaxAccumulators = kRegisters * 3 / 4;
constexpr int kVectorItemRows = 60;  // whole tiles of every height above

// What a pair of rows is multiplied with: number r of index i at data[r * kRowStride + i * stride].
template <size_t kRowStride>
struct Left {
    const float* data;
    size_t stride;
};

// Makes the compiler forget what it has loaded from here: kept values would push accumulators out of registers.
template <class T>
PELTON_INLINE void reload(const T*& from) {
    asm("" : "+r"(from));
}

// acc[r][n] += left's number r of one index * panel n's line of that index, which line(panel, part) gives.
template <int kRows, int kPanels, size_t kRowStride, class Line>
PELTON_INLINE void multiply_lines(const float* left, const Line& line, VecF (&acc)[kRows][kPanels * kParts]) {
    constexpr bool has_room = (kRows + 1) * kPanels * kParts < kRegisters;
    constexpr int kTogether = has_room ? kPanels : 1;
#pragma GCC unroll 16
    for (int first = 0; first < kPanels; first += kTogether) {
        reload(left);
        VecF b[kTogether * kParts];
#pragma GCC unroll 16
        for (int n = 0; n < kTogether * kParts; n++) b[n] = line(first + n / kParts, n % kParts);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; r++) {
            const VecF x = splat(left[static_cast<size_t>(r) * kRowStride]);
#pragma GCC unroll 16
            for (int n = 0; n < kTogether * kParts; n++) accumulate(acc[r][first * kParts + n], x, b[n]);
        }
    }
}

// What the lines of each panel are multiplied with before all else.
struct NoScales {
    PELTON_INLINE VecF apply(VecF line, int, int, int) const { return line; }
    PELTON_INLINE void reload_all() {}
    PELTON_INLINE void next() {}
};

// Lines of keys: one scale for each of the sixteen tokens.
template <int kPanels>
struct KeyScales {
    const float* of[kPanels];

    PELTON_INLINE VecF apply(VecF line, int panel, int part, int) const {
        return line * load(of[panel] + part * kLanes);
    }
    PELTON_INLINE void reload_all() {
#pragma GCC unroll 16
        for (int n = 0; n < kPanels; n++) reload(of[n]);
    }
    PELTON_INLINE void next() {}
};

// Lines of values: the scale of the line's token.
template <int kPanels>
struct ValueScales {
    const float* of[kPanels];

    PELTON_INLINE VecF apply(VecF line, int panel, int, int member) const { return line * splat(of[panel][member]); }
    PELTON_INLINE void reload_all() {}
    PELTON_INLINE void next() {
#pragma GCC unroll 16
        for (int n = 0; n < kPanels; n++) of[n] += 2;
    }
};

// acc[r][n] += sum over i in [0, count) of left's number r of index i * panel n's line i; count is even. With kAhead,
// as many lines as are read come into L2 from `ahead` on: evenly spread, or they would wait for each other.
template <class Element, bool kAhead, int kRows, int kPanels, size_t kRowStride, class Scales = NoScales>
PELTON_INLINE void multiply(Left<kRowStride> left, const uint8_t* (&panels)[kPanels], size_t count,
                            const uint8_t* ahead, VecF (&acc)[kRows][kPanels * kParts], Scales scales = {}) {
    constexpr size_t kBytes = kPanels * Element::kPairBytes;
    for (size_t i = 0; i < count; i += 2) {
        if constexpr (kAhead) {
#pragma GCC unroll 16
            for (size_t n = 0; n < kBytes; n += kLine) __builtin_prefetch(ahead + n, 0, 2);
            ahead += kBytes;
        }
        const auto even = [&](int panel, int part) __attribute__((always_inline)) {
            return scales.apply(Element::even(panels[panel], part), panel, part, 0);
        };
        const auto odd = [&](int panel, int part) __attribute__((always_inline)) {
            return scales.apply(Element::odd(panels[panel], part), panel, part, 1);
        };
        scales.reload_all();
        multiply_lines<kRows, kPanels, kRowStride>(left.data, even, acc);
        left.data += left.stride;
#pragma GCC unroll 16
        for (int n = 0; n < kPanels; n++) reload(panels[n]);
        scales.reload_all();
        multiply_lines<kRows, kPanels, kRowStride>(left.data, odd, acc);
        left.data += left.stride;
#pragma GCC unroll 16
        for (int n = 0; n < kPanels; n++) panels[n] += Element::kPairBytes;
        scales.next();
    }
}

template <int kRows, int kPanels>
PELTON_INLINE void write_panels(const VecF (&acc)[kRows][kPanels * kParts], float* const (&to)[kPanels], size_t ld) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; r++) {
#pragma GCC unroll 16
        for (int n = 0; n < kPanels * kParts; n++) {
            store(to[n / kParts] + static_cast<size_t>(r) * ld + n % kParts * kLanes, acc[r][n]);
        }
    }
}

// Queries lie as [head_dim, num_rows].
inline void put_query(const float* query, float scale, int row, int num_rows, int head_dim, uint8_t* queries) {
    float* to = reinterpret_cast<float*>(queries) + row;
    for (int i = 0; i < head_dim; i++, to += num_rows) *to = query[i] * scale;
}

// Where scales lie.
PELTON_INLINE const float* floats(const uint8_t* at) { return reinterpret_cast<const float*>(at); }

// While keys are read, the values of the same blocks are brought near; while values are, the keys of the next piece.
template <class Element, bool kAhead, int kRows, int kPanels>
PELTON_INLINE void score_panels(const AttendPiece& piece, int row, int panel, float* scores) {
    const size_t width = static_cast<size_t>(piece.head_dim), panel_bytes = key_panel_bytes<Element>(piece.head_dim);
    const size_t begin = scale_bytes<Element>(kGroup, piece.head_dim);
    const uint8_t *keys[kPanels], *first = nullptr;
    float* to[kPanels];
    for (int n = 0; n < kPanels; n++) {
        const uint8_t* block = piece.blocks[(panel + n) * kGroup / kBlockTokens];
        keys[n] = block + ((panel + n) % 2 ? panel_bytes : 0) + begin;
        to[n] = scores + (panel + n) * kGroup;
        if (n == 0) first = keys[n];
    }
    const uint8_t* values = first - begin + 2 * panel_bytes;
    Left<1> left = {floats(piece.queries) + row, static_cast<size_t>(piece.num_rows)};
    VecF acc[kRows][kPanels * kParts] = {};
    if constexpr (Element::kIsScaled) {
        KeyScales<kPanels> scales;
        for (int n = 0; n < kPanels; n++) scales.of[n] = floats(keys[n] - begin);
        for (size_t i = 0; i < width; i += kScaleColumns) {
            const size_t count = width - i < kScaleColumns ? width - i : kScaleColumns;
            multiply<Element, kAhead, kRows, kPanels, 1>(left, keys, count, values, acc, scales);
            left.data += count * left.stride;
            values += kPanels * line_of<Element>(count);
            for (int n = 0; n < kPanels; n++) scales.of[n] += kGroup;
        }
    } else {
        multiply<Element, kAhead, kRows, kPanels, 1>(left, keys, width, values, acc);
    }
    write_panels<kRows, kPanels>(acc, to, kPieceTokens);
}

template <class Element, bool kAhead, int kRows, int kPanels>
PELTON_INLINE void weigh_panels(const AttendPiece& piece, Range panels, int column_panel, const float* weights,
                                float* output, size_t ld) {
    const size_t keys = 2 * key_panel_bytes<Element>(piece.head_dim);
    const size_t scales_end = keys + scale_bytes<Element>(kBlockTokens, piece.value_dim);
    VecF acc[kRows][kPanels * kParts] = {};
    for (int begin = panels.begin * kGroup; begin < panels.end * kGroup;) {
        const int block = begin / kBlockTokens, block_end = (block + 1) * kBlockTokens;
        const int end = block_end < panels.end * kGroup ? block_end : panels.end * kGroup;
        const size_t count = static_cast<size_t>(end - begin);
        const uint8_t* columns[kPanels];
        for (int n = 0; n < kPanels; n++) {
            const size_t line = static_cast<size_t>(column_panel + n) * kBlockTokens + begin % kBlockTokens;
            columns[n] = piece.blocks[block] + scales_end + line_of<Element>(line);
        }
        const uint8_t* next = piece.next[block] ? piece.next[block] : piece.blocks[block];
        next += line_of<Element>(static_cast<size_t>(column_panel) * kBlockTokens);
        const Left<kPieceTokens> left = {weights + begin, 1};
        if constexpr (Element::kIsScaled) {
            ValueScales<kPanels> scales;
            for (int n = 0; n < kPanels; n++) {
                const int group = (column_panel + n) * kGroup / kScaleColumns;
                scales.of[n] = floats(piece.blocks[block] + keys) + group * kBlockTokens + begin % kBlockTokens;
            }
            multiply<Element, kAhead, kRows, kPanels, kPieceTokens>(left, columns, count, next, acc, scales);
        } else {
            multiply<Element, kAhead, kRows, kPanels, kPieceTokens>(left, columns, count, next, acc);
        }
        begin = end;
    }
    float* to[kPanels];
    for (int n = 0; n < kPanels; n++) to[n] = output + (column_panel + n) * kGroup;
    write_panels<kRows, kPanels>(acc, to, ld);
}

template <class Element, bool kAhead, int kRows>
void tile(const AttendPiece& piece, int row, const AttendPartial& out) {
    constexpr int kWide = kRows * kParts * 2 <= kMaxAccumulators ? 2 : 1;
    const size_t ld = static_cast<size_t>(padded_value_dim(piece.value_dim));
    const Range panels = visible_panels(piece, row, kRows);
    alignas(64) float scores[kRows * kPieceTokens];
    int panel = panels.begin;
    for (; panel + kWide <= panels.end; panel += kWide)
        score_panels<Element, kAhead, kRows, kWide>(piece, row, panel, scores);
    for (; panel < panels.end; panel++) score_panels<Element, kAhead, kRows, 1>(piece, row, panel, scores);
    for (int r = 0; r < kRows; r++) {
        soften(scores + r * kPieceTokens, visible(piece, row + r), panels, piece.softcap, out.maximum + row + r,
               out.sum + row + r);
    }
    float* output = out.output + static_cast<size_t>(row) * ld;
    const int num_panels = static_cast<int>(ld) / kGroup;
    int column = 0;
    for (; column + kWide <= num_panels; column += kWide) {
        weigh_panels<Element, kAhead, kRows, kWide>(piece, panels, column, scores, output, ld);
    }
    for (; column < num_panels; column++) {
        weigh_panels<Element, kAhead, kRows, 1>(piece, panels, column, scores, output, ld);
    }
}

template <class Element, bool kAhead, int kRows = kMaxRows>
void tile_of(const AttendPiece& piece, int row, int num_rows, const AttendPartial& out) {
    if (num_rows >= kRows) {
        tile<Element, kAhead, kRows>(piece, row, out);
    } else if constexpr (kRows > 1) {
        tile_of<Element, kAhead, kRows - 1>(piece, row, num_rows, out);
    }
}

template <class Element>
void attend_piece(const AttendPiece& piece, const AttendPartial& out) {
    tile_of<Element, true>(piece, 0, piece.num_rows, out);  // brings memory near for all of them
    for (int row = kMaxRows; row < piece.num_rows; row += kMaxRows) {
        tile_of<Element, false>(piece, row, piece.num_rows - row, out);
    }
}

template <class Element>
constexpr AttentionKernel vector_attention = {
    kVectorItemRows, store_token<Element>, put_query, attend_piece<Element>, merge, finish};

}  // namespace pelton::PELTON_ISA
