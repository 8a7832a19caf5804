// file_blocks.h: blocks of quantised weights as files hold them (GGML's layouts), as codes and scales.
//
// The value of a code is scale * code + minimum; for types without a minimum it is -offset * scale.
#pragma once

#include <cstdint>

#include "types.h"

namespace pelton::amx {

// `codes` of the second half of a block stand in the high nibbles.
inline void split_nibbles(const uint8_t* nibbles, int num_bytes, uint8_t* codes) {
    for (int i = 0; i < num_bytes; i++) {
        codes[i] = nibbles[i] & 15;
        codes[i + num_bytes] = nibbles[i] >> 4;
    }
}
inline void add_fifth_bits(const uint8_t* bits, uint8_t* codes) {
    for (int i = 0; i < 32; i++) codes[i] |= static_cast<uint8_t>((bits[i / 8] >> (i % 8) & 1) << 4);
}

// Legacy types: 32 columns, one scale.
struct FileQ4_0 {
    static constexpr int kBytes = 18, kScale = 0;
    static void codes(const uint8_t* block, uint8_t* out) { split_nibbles(block + 2, 16, out); }
};
struct FileQ4_1 {
    static constexpr int kBytes = 20, kScale = 0, kMinimum = 2;
    static void codes(const uint8_t* block, uint8_t* out) { split_nibbles(block + 4, 16, out); }
};
struct FileQ5_0 {
    static constexpr int kBytes = 22, kScale = 0;
    static void codes(const uint8_t* block, uint8_t* out) {
        split_nibbles(block + 6, 16, out);
        add_fifth_bits(block + 2, out);
    }
};
struct FileQ5_1 {
    static constexpr int kBytes = 24, kScale = 0, kMinimum = 2;
    static void codes(const uint8_t* block, uint8_t* out) {
        split_nibbles(block + 8, 16, out);
        add_fifth_bits(block + 4, out);
    }
};
struct FileQ8_0 {
    static constexpr int kBytes = 34, kScale = 0;
    static void codes(const uint8_t* block, uint8_t* out) {
        for (int i = 0; i < 32; i++) out[i] = block[2 + i] ^ 0x80;  // code = value + 128
    }
};

// K-quants: 256 columns, a scale (and a minimum) per 16 or 32 of them.
struct FileQ2_K {
    static constexpr int kBytes = 84, kScale = 80, kMinimum = 82;
    static void codes(const uint8_t* block, uint8_t* out) {
        for (int i = 0; i < 256; i++) out[i] = block[16 + i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
    }
    static void scales(const uint8_t* block, uint8_t* scale, uint8_t* minimum) {
        for (int i = 0; i < 16; i++) {
            scale[i] = block[i] & 15;
            minimum[i] = block[i] >> 4;
        }
    }
};
struct FileQ3_K {
    static constexpr int kBytes = 110, kScale = 108;
    static void codes(const uint8_t* block, uint8_t* out) {
        for (int i = 0; i < 256; i++) {
            const int low = block[32 + i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
            out[i] = static_cast<uint8_t>(low | (block[i % 32] >> (i / 32) & 1) << 2);
        }
    }
    // Six bits each: low nibbles in eight bytes, the upper pairs in four more. Signed, after subtracting 32.
    static void scales(const uint8_t* block, uint8_t* scale) {
        for (int i = 0; i < 16; i++) {
            const int low = block[96 + i % 8] >> (i / 8 * 4) & 15, high = block[104 + i % 4] >> (i / 4 * 2) & 3;
            scale[i] = static_cast<uint8_t>((low | high << 4) - 32);
        }
    }
};
// Eight scales and eight minimums of six bits in twelve bytes (Q4_K and Q5_K).
inline void six_bit_scales(const uint8_t* packed, uint8_t* scale, uint8_t* minimum) {
    for (int j = 0; j < 4; j++) {
        scale[j] = packed[j] & 63;
        minimum[j] = packed[j + 4] & 63;
        scale[j + 4] = static_cast<uint8_t>((packed[j + 8] & 15) | (packed[j] >> 6) << 4);
        minimum[j + 4] = static_cast<uint8_t>(packed[j + 8] >> 4 | (packed[j + 4] >> 6) << 4);
    }
}
struct FileQ4_K {
    static constexpr int kBytes = 144, kScale = 0, kMinimum = 2;
    static void codes(const uint8_t* block, uint8_t* out) {
        for (int c = 0; c < 4; c++) split_nibbles(block + 16 + 32 * c, 32, out + 64 * c);
    }
    static void scales(const uint8_t* block, uint8_t* scale, uint8_t* minimum) {
        six_bit_scales(block + 4, scale, minimum);
    }
};
struct FileQ5_K {
    static constexpr int kBytes = 176, kScale = 0, kMinimum = 2;
    static void codes(const uint8_t* block, uint8_t* out) {
        for (int c = 0; c < 4; c++) split_nibbles(block + 48 + 32 * c, 32, out + 64 * c);
        for (int i = 0; i < 256; i++) out[i] |= static_cast<uint8_t>((block[16 + i % 32] >> (i / 32) & 1) << 4);
    }
    static void scales(const uint8_t* block, uint8_t* scale, uint8_t* minimum) {
        six_bit_scales(block + 4, scale, minimum);
    }
};
struct FileQ6_K {
    static constexpr int kBytes = 210, kScale = 208;
    static void codes(const uint8_t* block, uint8_t* out) {
        for (int half = 0; half < 2; half++, out += 128) {
            split_nibbles(block + 64 * half, 64, out);
            for (int i = 0; i < 128; i++)
                out[i] |= static_cast<uint8_t>((block[128 + 32 * half + i % 32] >> (i / 32 * 2) & 3) << 4);
        }
    }
    static void scales(const uint8_t* block, uint8_t* scale) { __builtin_memcpy(scale, block + 192, 16); }
};

}  // namespace pelton::amx
