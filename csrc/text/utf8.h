// Characters of texts in UTF-8.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace pelton {

// Bytes of the character that begins so.
inline size_t character_size(char first) {
    const int ones = std::countl_one(static_cast<uint8_t>(first));
    return ones == 0 ? 1 : static_cast<size_t>(ones);
}

}  // namespace pelton
