// kv.h: the keys and values of one cache group, in blocks of 32 tokens.
//
// A block's bytes for one layer and one KV head are laid out as the attention kernel multiplies them:
//   keys    two panels of sixteen tokens; in a panel the columns two by two, each pair for all its tokens
//   values  ceil(value_dim / 16) panels of sixteen columns; in a panel the tokens two by two, each pair for all its
//           columns
// A pair's bytes, for the sixteen tokens or columns t of its panel:
//   f32         sixteen numbers of the even member, sixteen of the odd one
//   bf16        sixteen words, the even member of t in the low half of word t
//   f16, int8   the same as f32
// An int8 number is to be multiplied by the float32 scale of its token and its 32 columns. A panel of keys begins with
// its scales: for each 32 columns those of its sixteen tokens. Values begin with theirs: for each 32 columns those of
// the block's tokens.
// Columns of values past value_dim stay zero.
// Everything stored is finite, and memory begins as zeros, so a masked slot multiplied by zero is zero.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/attention.h"
#include "memory.h"

namespace pelton {

// What one cache group keeps; see CacheGroup in ops/data.py.
struct KVShape {
    int num_layers;
    int num_kv_heads;
    int head_dim;  // even
    int value_dim;
    KVType type;

    size_t key_bytes() const;    // of one head in one layer of one block
    size_t head_bytes() const;   // keys and values of the same
    size_t layer_bytes() const;  // all heads in one layer of one block
    size_t block_bytes() const;  // all layers of one block
};

class KVCache {
  public:
    // Reserves zeroed memory for `num_blocks`. Throws std::bad_alloc where the system refuses.
    KVCache(const KVShape& shape, int num_blocks);

    const KVShape& shape() const { return shape_; }
    int num_blocks() const { return num_blocks_; }
    // Block 0 of one layer; block b begins shape().layer_bytes() * b further.
    uint8_t* layer(int index) const { return memory_.data() + layer_stride_ * static_cast<size_t>(index); }

    // All slots of a block, in every layer: those that nobody filled are as good in the copy as before it.
    void copy(int src, int dst);
    // shape().block_bytes() bytes for each of `count` blocks.
    void read(const int32_t* blocks, int count, uint8_t* out) const;
    void write(const int32_t* blocks, int count, const uint8_t* from);

  private:
    KVShape shape_;
    int num_blocks_;
    size_t layer_stride_;
    Memory memory_;
};

}  // namespace pelton
