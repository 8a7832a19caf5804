// file_blocks.h: blocks of quantised weights as files hold them (GGML's layouts), as codes and scales: what every
// instruction set's packing starts from.
//
// The value of a code is scale * code + minimum; for types without a minimum it is scale * (code - kOffset); for those
// with a table it is scale * kTable[code]. `codes` gives those of columns [32 j, 32 j + 32) of a block. kScale and
// kMinimum are where a block's binary16 numbers stand; blocks of 256 columns multiply them by integers, `scale` and
// `minimum`, of which a block has kScales each (of Q3_K, Q6_K and IQ4_XS in two's complement).
#pragma once

#include <cstdint>

#include "types.h"

namespace pelton::PELTON_ISA {

// Two codes a byte: those of the first half of a run stand in the low nibbles.
inline void split_nibbles(const uint8_t* nibbles, uint8_t* codes) {
    for (int i = 0; i < 16; i++) {
        codes[i] = nibbles[i] & 15;
        codes[i + 16] = nibbles[i] >> 4;
    }
}
inline void add_fifth_bits(const uint8_t* bits, uint8_t* codes) {
    const uint32_t word = load_as<uint32_t>(bits);
    for (int i = 0; i < 32; i++) codes[i] |= static_cast<uint8_t>((word >> i & 1) << 4);
}

// Legacy types: 32 columns, one scale.
struct FileQ4_0 {
    static constexpr int kColumns = 32, kBytes = 18, kScale = 0, kOffset = 8;
    static void codes(const uint8_t* block, int, uint8_t* out) { split_nibbles(block + 2, out); }
};
struct FileQ4_1 {
    static constexpr int kColumns = 32, kBytes = 20, kScale = 0, kMinimum = 2;
    static void codes(const uint8_t* block, int, uint8_t* out) { split_nibbles(block + 4, out); }
};
struct FileQ5_0 {
    static constexpr int kColumns = 32, kBytes = 22, kScale = 0, kOffset = 16;
    static void codes(const uint8_t* block, int, uint8_t* out) {
        split_nibbles(block + 6, out);
        add_fifth_bits(block + 2, out);
    }
};
struct FileQ5_1 {
    static constexpr int kColumns = 32, kBytes = 24, kScale = 0, kMinimum = 2;
    static void codes(const uint8_t* block, int, uint8_t* out) {
        split_nibbles(block + 8, out);
        add_fifth_bits(block + 4, out);
    }
};
struct FileQ8_0 {
    static constexpr int kColumns = 32, kBytes = 34, kScale = 0, kValues = 2, kOffset = 128;
    static void codes(const uint8_t* block, int, uint8_t* out) {
        for (int i = 0; i < 32; i++) out[i] = block[kValues + i] ^ 0x80;
    }
};

// What the codes of IQ4_NL and IQ4_XS stand for.
struct IQ4Values {
    static constexpr int8_t kTable[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
};
struct FileIQ4_NL : IQ4Values {
    static constexpr int kColumns = 32, kBytes = 18, kScale = 0;
    static void codes(const uint8_t* block, int, uint8_t* out) { split_nibbles(block + 2, out); }
};

// K-quants: 256 columns in eight times 32.

// Bits of values i, i + 32, ... stand in byte i of a run of 32 bytes, the lowest first: those of the j-th 32 values.
inline void split_pairs(const uint8_t* bytes, int j, uint8_t* codes) {
    for (int i = 0; i < 32; i++) codes[i] = bytes[32 * (j / 4) + i] >> (2 * (j % 4)) & 3;
}
inline void split_pair_of_nibbles(const uint8_t* bytes, int j, uint8_t* codes) {
    for (int i = 0; i < 32; i++) codes[i] = bytes[32 * (j / 2) + i] >> (j % 2 * 4) & 15;
}
inline void add_bits(const uint8_t* bytes, int j, int to, uint8_t* codes) {
    for (int i = 0; i < 32; i++) codes[i] |= static_cast<uint8_t>((bytes[i] >> j & 1) << to);
}

struct FileQ2_K {
    static constexpr int kColumns = 256, kBytes = 84, kScale = 80, kMinimum = 82, kScales = 16;
    static void codes(const uint8_t* block, int j, uint8_t* out) { split_pairs(block + 16, j, out); }
    static uint8_t scale(const uint8_t* block, int i) { return block[i] & 15; }
    static uint8_t minimum(const uint8_t* block, int i) { return block[i] >> 4; }
};
struct FileQ3_K {
    static constexpr int kColumns = 256, kBytes = 110, kScale = 108, kScales = 16, kOffset = 4;
    static void codes(const uint8_t* block, int j, uint8_t* out) {
        split_pairs(block + 32, j, out);
        add_bits(block, j, 2, out);
    }
    // Six bits each: low nibbles in eight bytes, the upper pairs in four more. Signed, after subtracting 32.
    static uint8_t scale(const uint8_t* block, int i) {
        const int low = block[96 + i % 8] >> (i / 8 * 4) & 15, high = block[104 + i % 4] >> (i / 4 * 2) & 3;
        return static_cast<uint8_t>((low | high << 4) - 32);
    }
};

// Eight scales and eight minimums of six bits in twelve bytes, the last four's top bits apart (Q4_K and Q5_K).
struct SixBitScales {
    static uint8_t scale(const uint8_t* block, int i) {
        const uint8_t* packed = block + 4;
        return static_cast<uint8_t>(i < 4 ? packed[i] & 63 : (packed[i + 4] & 15) | packed[i - 4] >> 6 << 4);
    }
    static uint8_t minimum(const uint8_t* block, int i) {
        const uint8_t* packed = block + 4;
        return static_cast<uint8_t>(i < 4 ? packed[i + 4] & 63 : packed[i + 4] >> 4 | packed[i] >> 6 << 4);
    }
};
struct FileQ4_K : SixBitScales {
    static constexpr int kColumns = 256, kBytes = 144, kScale = 0, kMinimum = 2, kScales = 8;
    static void codes(const uint8_t* block, int j, uint8_t* out) { split_pair_of_nibbles(block + 16, j, out); }
};
struct FileQ5_K : SixBitScales {
    static constexpr int kColumns = 256, kBytes = 176, kScale = 0, kMinimum = 2, kScales = 8;
    static void codes(const uint8_t* block, int j, uint8_t* out) {
        split_pair_of_nibbles(block + 48, j, out);
        add_bits(block + 16, j, 4, out);
    }
};
struct FileQ6_K {
    static constexpr int kColumns = 256, kBytes = 210, kScale = 208, kScales = 16, kOffset = 32;
    static void codes(const uint8_t* block, int j, uint8_t* out) {
        const uint8_t* low = block + 64 * (j / 4) + 32 * (j % 2);
        const uint8_t* high = block + 128 + 32 * (j / 4);
        for (int i = 0; i < 32; i++)
            out[i] = static_cast<uint8_t>((low[i] >> (j % 4 / 2 * 4) & 15) | (high[i] >> (2 * (j % 4)) & 3) << 4);
    }
    static uint8_t scale(const uint8_t* block, int i) { return block[192 + i]; }
};
struct FileIQ4_XS : IQ4Values {
    static constexpr int kColumns = 256, kBytes = 136, kScale = 0, kScales = 8;
    static void codes(const uint8_t* block, int j, uint8_t* out) { split_nibbles(block + 8 + 16 * j, out); }
    // Six bits each: the upper pairs in one word, low nibbles in four bytes. Signed, after subtracting 32.
    static uint8_t scale(const uint8_t* block, int i) {
        const int low = block[4 + i / 2] >> (i % 2 * 4) & 15, high = block[2 + i / 4] >> (i % 4 * 2) & 3;
        return static_cast<uint8_t>((low | high << 4) - 32);
    }
};

}  // namespace pelton::PELTON_ISA
