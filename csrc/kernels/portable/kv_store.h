// kv_store.h: one token's key and value into a block, as kv.h lays it out.
#pragma once

#include "kernels/portable/kv_elements.h"

namespace pelton::PELTON_ISA {

// What cannot be multiplied by zero may not enter the cache: another sequence may own the block next.
inline float finite(float x, float largest) {
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
inline void store_token<Int8>(const float* key, const float* value, int head_dim, int value_dim, int slot,
                              uint8_t* head) {
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

}  // namespace pelton::PELTON_ISA
