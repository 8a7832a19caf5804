// int8_planes.h: how quantised weights lie in a packed tile of 16 rows.
//
// The 32 columns of a block are eight groups of four. A plane is 64 bytes: 16 rows x 4 columns, so byte 4 r + c speaks
// of row r and column c of one or more groups. Four-bit values take four planes (plane v: group v in the low half,
// group v + 4 in the high half), one-bit values one (bit g: group g), two-bit values two (plane 0 groups 0 to 3,
// plane 1 groups 4 to 7, two bits each), eight-bit values eight.
#pragma once

#include "kernels/table.h"

namespace pelton::PELTON_ISA {

constexpr int kPlane = 64;

// Groups of four values at once, as the bytes of a word. `q` are the block's 32 values of row r.
inline void put_nibbles(const uint8_t* q, int r, uint8_t* planes) {
    for (int v = 0; v < 4; v++) {
        const uint32_t low = load_as<uint32_t>(q + 4 * v) & 0x0f0f0f0fu;
        const uint32_t high = load_as<uint32_t>(q + 16 + 4 * v) & 0x0f0f0f0fu;
        store_as(planes + kPlane * v + 4 * r, low | high << 4);
    }
}
template <int kBit>  // which bit of the values
inline void put_bits(const uint8_t* q, int r, uint8_t* plane) {
    uint32_t word = 0;
    for (int g = 0; g < 8; g++) word |= (load_as<uint32_t>(q + 4 * g) >> kBit & 0x01010101u) << g;
    store_as(plane + 4 * r, word);
}
template <int kBit>  // the lower of the two
inline void put_pairs(const uint8_t* q, int r, uint8_t* planes) {
    for (int p = 0; p < 2; p++) {
        uint32_t word = 0;
        for (int g = 0; g < 4; g++) word |= (load_as<uint32_t>(q + 16 * p + 4 * g) >> kBit & 0x03030303u) << (2 * g);
        store_as(planes + kPlane * p + 4 * r, word);
    }
}
inline void put_bytes(const uint8_t* q, int r, uint8_t* planes) {
    for (int g = 0; g < 8; g++) store_as(planes + kPlane * g + 4 * r, load_as<uint32_t>(q + 4 * g));
}

inline int get_nibble(const uint8_t* planes, int r, int k) {
    return planes[kPlane * (k % 16 / 4) + 4 * r + k % 4] >> (k / 16 * 4) & 15;
}
inline int get_bit(const uint8_t* plane, int r, int k) { return plane[4 * r + k % 4] >> (k / 4) & 1; }
inline int get_pair(const uint8_t* planes, int r, int k) {
    return planes[kPlane * (k / 16) + 4 * r + k % 4] >> (k % 16 / 4 * 2) & 3;
}
inline int get_byte(const uint8_t* planes, int r, int k) { return planes[kPlane * (k / 4) + 4 * r + k % 4]; }

}  // namespace pelton::PELTON_ISA
