// Attention over paged keys and values: one piece of 256 keys at a time, and the merge of pieces.
//
// Both products (scores = q . keys, output = weights . values) are the same loop: a few rows of float32 times
// panels of sixteen columns, one chain of fused multiply-adds per result over an ascending index. So a result
// depends on nothing but its own row and column, whatever tile it was computed in.
#include "kernels/attention.h"

#include "kernels/portable/kv_elements.h"
#include "kernels/portable/math.h"

namespace pelton::PELTON_ISA {
namespace {

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

// The keys of a piece that a row sees: [begin, end), counted from the piece's first key.
struct Range {
    int begin, end;
};

Range visible(const AttendPiece& piece, int row) {
    const int end = piece.positions[row] + 1 - piece.first_position;
    const int begin = piece.window > 0 ? end - piece.window : 0;
    const Range range = {begin > 0 ? begin : 0, end < kPieceTokens ? end : kPieceTokens};
    return range.begin < range.end ? range : Range{0, 0};
}

// The panels of sixteen keys that any row of a tile sees.
Range visible_panels(const AttendPiece& piece, int row, int num_rows) {
    Range panels = {kPieceTokens / kGroup, 0};
    for (int r = row; r < row + num_rows; r++) {
        const Range keys = visible(piece, r);
        if (keys.begin == keys.end) continue;
        if (keys.begin / kGroup < panels.begin) panels.begin = keys.begin / kGroup;
        if ((keys.end + kGroup - 1) / kGroup > panels.end) panels.end = (keys.end + kGroup - 1) / kGroup;
    }
    return panels;
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
    Left<1> left = {piece.queries + row, static_cast<size_t>(piece.num_rows)};
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

void fill(float* row, int begin, int end, float value) {
    for (int i = begin; i < end; i++) row[i] = value;
}

void cap(float* scores, Range panels, float softcap) {
    const VecF inverse = splat(1.0f / softcap), scale = splat(softcap);
    for (int i = panels.begin * kGroup; i < panels.end * kGroup; i += kLanes) {
        store(scores + i, scale * tanh(load(scores + i) * inverse));
    }
}

// Turns a row's scores into weights relative to their own maximum; returns maximum and sum of weights.
void soften(float* scores, Range keys, Range panels, float softcap, float* maximum, float* sum) {
    constexpr float kNone = -__builtin_inff();
    if (keys.begin == keys.end) {
        fill(scores, panels.begin * kGroup, panels.end * kGroup, 0.0f);
        *maximum = kNone;
        *sum = 0.0f;
        return;
    }
    if (softcap > 0) cap(scores, panels, softcap);
    fill(scores, panels.begin * kGroup, keys.begin, kNone);
    fill(scores, keys.end, panels.end * kGroup, kNone);
    VecF most[kParts], total[kParts];
    for (int n = 0; n < kParts; n++) most[n] = splat(kNone), total[n] = splat(0.0f);
    for (int i = panels.begin * kGroup; i < panels.end * kGroup; i += kGroup) {
        for (int n = 0; n < kParts; n++) most[n] = max(load(scores + i + n * kLanes), most[n]);
    }
    *maximum = max_group(most);
    for (int i = panels.begin * kGroup; i < panels.end * kGroup; i += kGroup) {
        for (int n = 0; n < kParts; n++) {
            float* place = scores + i + n * kLanes;
            const VecF weight = exp(load(place) - *maximum);
            store(place, weight);
            total[n] += weight;
        }
    }
    *sum = sum_group(total);
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

// What cannot be multiplied by zero may not enter the cache: another sequence may own the block next.
float finite(float x, float largest) {
    if (x != x) return 0.0f;
    return x > largest ? largest : x < -largest ? -largest : x;
}

template <class Element>
void store_token(const float* key, const float* value, int head_dim, int value_dim, int slot, uint8_t* head) {
    uint8_t* panel = head + (slot >= kGroup ? key_panel_bytes<Element>(head_dim) : 0);
    for (int i = 0; i < head_dim; i++) {
        Element::put(panel + line_of<Element>(static_cast<size_t>(i)), static_cast<size_t>(slot % kGroup), i % 2,
                     finite(key[i], Element::kLargest));
    }
    uint8_t* values = head + 2 * key_panel_bytes<Element>(head_dim);
    for (int i = 0; i < value_dim; i++) {
        const size_t line = static_cast<size_t>(i / kGroup * kBlockTokens + slot);
        Element::put(values + line_of<Element>(line), static_cast<size_t>(i % kGroup), slot % 2,
                     finite(value[i], Element::kLargest));
    }
}

// put(i, integer) for each of `width` numbers, scale(g, scale) for each 32 of them.
template <class Put, class PutScale>
void quantise(const float* from, int width, const Put& put, const PutScale& put_scale) {
    for (int first = 0; first < width; first += kScaleColumns) {
        const int count = width - first < kScaleColumns ? width - first : kScaleColumns;
        float numbers[kScaleColumns];
        for (int i = 0; i < count; i++) numbers[i] = finite(from[first + i], Int8::kLargest);
        const Quantised group(numbers, count);
        put_scale(first / kScaleColumns, group.scale);
        for (int i = 0; i < count; i++) put(first + i, group.values[i]);
    }
}

template <>
void store_token<Int8>(const float* key, const float* value, int head_dim, int value_dim, int slot, uint8_t* head) {
    const size_t token = static_cast<size_t>(slot % kGroup);
    uint8_t* scales = head + (slot >= kGroup ? key_panel_bytes<Int8>(head_dim) : 0);
    uint8_t* panel = scales + scale_bytes<Int8>(kGroup, head_dim);
    quantise(
        key, head_dim,
        [&](int i, int8_t x) { Int8::put(panel + line_of<Int8>(static_cast<size_t>(i)), token, i % 2, x); },
        [&](int group, float scale) {
            store_as(scales + (static_cast<size_t>(group * kGroup) + token) * sizeof scale, scale);
        });
    scales = head + 2 * key_panel_bytes<Int8>(head_dim);
    uint8_t* values = scales + scale_bytes<Int8>(kBlockTokens, value_dim);
    quantise(
        value, value_dim,
        [&](int i, int8_t x) {
            const size_t line = static_cast<size_t>(i / kGroup * kBlockTokens + slot);
            Int8::put(values + line_of<Int8>(line), static_cast<size_t>(i % kGroup), slot % 2, x);
        },
        [&](int group, float scale) {
            store_as(scales + static_cast<size_t>(group * kBlockTokens + slot) * sizeof scale, scale);
        });
}

// (M, L, O) <- with m = max(M, M'), a = exp(M - m), b = exp(M' - m): (m, a L + b L', a O + b O').
void merge(int num_rows, int value_dim, const AttendPartial& into, const AttendPartial& from) {
    const int width = padded_value_dim(value_dim);
    for (int r = 0; r < num_rows; r++) {
        if (from.sum[r] == 0) continue;  // this row sees nothing of that piece
        const float both = into.maximum[r] > from.maximum[r] ? into.maximum[r] : from.maximum[r];
        const VecF a = splat(exp(splat(into.maximum[r] - both))[0]);
        const VecF b = splat(exp(splat(from.maximum[r] - both))[0]);
        into.maximum[r] = both;
        into.sum[r] = fma(a[0], into.sum[r], b[0] * from.sum[r]);
        float* output = into.output + static_cast<size_t>(r) * width;
        const float* other = from.output + static_cast<size_t>(r) * width;
        for (int i = 0; i < width; i += kLanes) {
            store(output + i, fma(a, load(output + i), b * load(other + i)));
        }
    }
}

void finish(const AttendPartial& state, int row, int value_dim, float* out) {
    const float* output = state.output + static_cast<size_t>(row) * static_cast<size_t>(padded_value_dim(value_dim));
    const float scale = 1.0f / state.sum[row];
    for (int i = 0; i < value_dim; i++) out[i] = output[i] * scale;
}

}  // namespace

const AttentionKernel attention_kernels[kNumKVTypes] = {
    {store_token<Float32>, attend_piece<Float32>, merge, finish},
    {store_token<BFloat16>, attend_piece<BFloat16>, merge, finish},
    {store_token<Float16>, attend_piece<Float16>, merge, finish},
    {store_token<Int8>, attend_piece<Int8>, merge, finish},
};

}  // namespace pelton::PELTON_ISA
