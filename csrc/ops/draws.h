// draws.h: keyed random bits, and integer shares of integer weights, exact whatever the order of summation.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace pelton {

// Philox4x32-10: 64 random bits by key.
inline uint64_t philox(uint64_t seed, int32_t position, int32_t choice, uint32_t draw) {
    uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
    uint32_t counter[4] = {static_cast<uint32_t>(position), static_cast<uint32_t>(choice), draw, 0};
    for (int round = 0; round < 10; round++) {
        const uint64_t left = uint64_t{0xD2511F53} * counter[0], right = uint64_t{0xCD9E8D57} * counter[2];
        counter[0] = static_cast<uint32_t>(right >> 32) ^ counter[1] ^ key[0];
        counter[2] = static_cast<uint32_t>(left >> 32) ^ counter[3] ^ key[1];
        counter[1] = static_cast<uint32_t>(right);
        counter[3] = static_cast<uint32_t>(left);
        key[0] += 0x9E3779B9;
        key[1] += 0xBB67AE85;
    }
    return uint64_t{counter[1]} << 32 | counter[0];
}

// The weight that is this share of a total; at least 1.
inline uint64_t share_of(float share, uint64_t total) {
    return static_cast<uint64_t>(std::max(1.0, std::ceil(static_cast<double>(share) * static_cast<double>(total))));
}

}  // namespace pelton
