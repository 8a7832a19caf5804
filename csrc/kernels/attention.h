// attention.h: the kernels of paged attention: one table per instruction set and type of cache.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pelton {

enum class KVType : int { F32 = 0, BF16 = 1, F16 = 2, Int8 = 3 };
constexpr int kNumKVTypes = 4;

constexpr int kBlockTokens = 32;   // tokens per block of KV memory
constexpr int kPieceTokens = 256;  // keys that share one maximum, counted from position 0 of the sequence

constexpr int kScaleColumns = 32;  // columns of a token that share a scale in an int8 cache

constexpr int num_scales(int width) { return (width + kScaleColumns - 1) / kScaleColumns; }

// Columns of an output row in the kernels' own buffers.
constexpr int padded_value_dim(int value_dim) { return (value_dim + 15) / 16 * 16; }

// Some query rows of one sequence that share a KV head, and one piece of its keys. Row r sees the keys at
// positions[r] - window + 1 .. positions[r] (window 0: 0 .. positions[r]).
struct AttendPiece {
    const uint8_t* queries;    // as the kernel's put_query left them
    const int32_t* positions;  // [num_rows]
    int num_rows;
    int head_dim;
    int value_dim;
    int window;
    float softcap;                                       // 0: none
    int first_position;                                  // of the piece, a multiple of kPieceTokens
    const uint8_t* blocks[kPieceTokens / kBlockTokens];  // the head's bytes in each block that some row sees part of
    const uint8_t* next[kPieceTokens / kBlockTokens];    // those of the piece that will be asked for next; or null
};

// Softmax over some of a row's keys, not yet divided: weights relative to `maximum`, their sum, and the weighted sum
// of values. A row that sees no key has maximum -inf, sum 0 and output 0.
struct AttendPartial {
    float* maximum;  // [num_rows]
    float* sum;      // [num_rows]
    float* output;   // [num_rows, padded_value_dim]
};

// The most rows of an item, and the bytes that their queries take at most; they are 64-byte aligned.
constexpr int kMaxItemRows = 64;
constexpr size_t query_bytes(int num_rows, int head_dim) {
    return static_cast<size_t>((num_rows + 15) / 16 * 16) * static_cast<size_t>((head_dim + 31) / 32 * 32) * 4;
}

struct AttentionKernel {
    // So many rows share a walk over the keys best, where the step has them; at most kMaxItemRows.
    int item_rows;
    // Rounds one token's key and value of one head to the cache type and puts them into slot `slot` of a block.
    // NaN is stored as 0; what is too large as the largest half for f16, as the largest bf16 for the others.
    void (*store)(const float* key, const float* value, int head_dim, int value_dim, int slot, uint8_t* head);
    // Puts one of num_rows queries, times the scale of scores, where `piece` reads it.
    void (*put_query)(const float* query, float scale, int row, int num_rows, int head_dim, uint8_t* queries);
    // One piece on its own. A row's result depends on that row and its keys alone.
    void (*piece)(const AttendPiece& piece, const AttendPartial& out);
    // into <- into merged with from, the piece after it.
    void (*merge)(int num_rows, int value_dim, const AttendPartial& into, const AttendPartial& from);
    // out[value_dim] = output / sum of one row.
    void (*finish)(const AttendPartial& state, int row, int value_dim, float* out);
};

}  // namespace pelton

#ifdef PELTON_ISA  // the tables that this unit's instruction set has: kernels/portable/attention.cpp
namespace pelton::PELTON_ISA {
extern const AttentionKernel attention_kernels[kNumKVTypes];  // by KVType
}
#endif
