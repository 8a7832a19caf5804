// kv.h: the keys and values of one cache group, in blocks of 32 tokens.
//
// A block's bytes for one layer and one KV head are 64-byte lines of sixteen 32-bit words, laid out as the
// attention kernel multiplies them:
//   keys    two panels of sixteen tokens; in a panel one line for each pair of columns (bf16) or each column (f32);
//           word t of a line is token t of the panel
//   values  ceil(value_dim / 16) panels of sixteen columns; in a panel one line for each pair of tokens (bf16) or
//           each token (f32); word c of a line is column c of the panel
// A bf16 word holds the even member of its pair in the low half. Columns of values past value_dim stay zero.
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
