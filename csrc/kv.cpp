#include "kv.h"

#include <cstring>

namespace pelton {
namespace {

size_t element_bytes(KVType type) { return type == KVType::F32 ? 4 : type == KVType::Int8 ? 1 : 2; }

// Of the numbers of one block's tokens, `columns` of each, and of the scales of `width` of them.
size_t token_bytes(KVType type, int columns, int width) {
    const size_t scales = type == KVType::Int8 ? static_cast<size_t>(num_scales(width)) * sizeof(float) : 0;
    return kBlockTokens * (element_bytes(type) * static_cast<size_t>(columns) + scales);
}

}  // namespace

size_t KVShape::key_bytes() const { return token_bytes(type, head_dim, head_dim); }

size_t KVShape::head_bytes() const { return key_bytes() + token_bytes(type, padded_value_dim(value_dim), value_dim); }

size_t KVShape::layer_bytes() const { return head_bytes() * static_cast<size_t>(num_kv_heads); }

size_t KVShape::block_bytes() const { return layer_bytes() * static_cast<size_t>(num_layers); }

KVCache::KVCache(const KVShape& shape, int num_blocks)
    : shape_(shape),
      num_blocks_(num_blocks),
      layer_stride_(shape.layer_bytes() * static_cast<size_t>(num_blocks)),
      memory_(layer_stride_ * static_cast<size_t>(shape.num_layers)) {}

void KVCache::copy(int src, int dst) {
    const size_t size = shape_.layer_bytes();
    for (int i = 0; i < shape_.num_layers; i++) {
        std::memcpy(layer(i) + size * static_cast<size_t>(dst), layer(i) + size * static_cast<size_t>(src), size);
    }
}

void KVCache::read(const int32_t* blocks, int count, uint8_t* out) const {
    const size_t size = shape_.layer_bytes();
    for (int b = 0; b < count; b++) {
        for (int i = 0; i < shape_.num_layers; i++, out += size) {
            std::memcpy(out, layer(i) + size * static_cast<size_t>(blocks[b]), size);
        }
    }
}

void KVCache::write(const int32_t* blocks, int count, const uint8_t* from) {
    const size_t size = shape_.layer_bytes();
    for (int b = 0; b < count; b++) {
        for (int i = 0; i < shape_.num_layers; i++, from += size) {
            std::memcpy(layer(i) + size * static_cast<size_t>(blocks[b]), from, size);
        }
    }
}

}  // namespace pelton
