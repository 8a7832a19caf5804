// int8_types.h: the types with blocks of 32 (GGML's Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL) as the Int8 kernels see them.
//
// Each type says how its file block becomes planes, how planes become the bytes of a dot product, and how one block of
// 32 columns is added to a sum: the exact integer dot, then one fma with weight scale x activation scale, and for types
// with a minimum one more fma.
#pragma once

#include "kernels/portable/dot.h"
#include "kernels/portable/file_blocks.h"
#include "kernels/portable/int8_activations.h"
#include "kernels/portable/int8_planes.h"

namespace pelton::PELTON_ISA {

// One block of 32 columns of a packed tile. Blocks stand in groups of eight (the last may be shorter): the group's
// header, its blocks' headers (filled up to 64 bytes), its blocks' planes.
template <class Byte>
struct BlockOf {
    Byte* group;
    Byte* header;
    Byte* planes;
};
using Block = BlockOf<const uint8_t>;
using MutableBlock = BlockOf<uint8_t>;

constexpr int kHalves = kTileRows * 2;  // bytes of sixteen binary16 values

PELTON_INLINE VecF row_halves(const uint8_t* halves, int part) { return load_half(halves + part * kLanes * 2); }
PELTON_INLINE void put_half(uint8_t* halves, int r, const uint8_t* file) {
    store_as(halves + 2 * r, load_as<uint16_t>(file));
}
PELTON_INLINE float get_half(const uint8_t* halves, int r) { return half_to_float(load_as<uint16_t>(halves + 2 * r)); }

// The bytes of a dot product: word g is group g of kLanes rows.
struct Quants {
    Bytes w[8];
};

PELTON_INLINE Quants unpack_nibbles(const uint8_t* planes, int part) {
    Quants out;
    for (int v = 0; v < 4; v++) {
        const Bytes both = load_bytes(planes + kPlane * v + part * kLanes * 4);
        out.w[v] = and_mask(both, 15);
        out.w[v + 4] = and_mask(shift<-4>(both), 15);
    }
    return out;
}

// Sets bit kTo of every value from a plane of single bits.
template <int kTo, int g = 0>
PELTON_INLINE void unpack_bits(Bytes plane, Quants& out) {
    if constexpr (g < 8) {
        out.w[g] = out.w[g] | and_mask(shift<kTo - g>(plane), 1 << kTo);
        unpack_bits<kTo, g + 1>(plane, out);
    }
}

struct Q4_0 {
    using File = FileQ4_0;
    static constexpr int kGroupHeader = 0, kBlockHeader = kHalves, kPlanes = 4 * kPlane;
    struct Weights {
        Quants q;
        VecF scale;
    };
    PELTON_INLINE static Weights unpack(Block b, int part) {
        return {unpack_nibbles(b.planes, part), row_halves(b.header, part)};
    }
    PELTON_INLINE static VecF accumulate(const Weights& w, const int8_t* x, const BlockInfo& info, VecF sum) {
        const VecI product = dot<8>(w.q.w, x) + splat(info.minus_sum8);
        return fused(to_float(product), w.scale * splat(info.scale), sum);
    }
    PELTON_INLINE static void pack(const uint8_t* file, int j, int r, MutableBlock b) {
        uint8_t q[32];
        file += j * File::kBytes;
        File::codes(file, 0, q);
        put_half(b.header, r, file + File::kScale);
        put_nibbles(q, r, b.planes);
    }
    PELTON_INLINE static void dequantize(Block b, int r, float* out) {
        for (int k = 0; k < 32; k++) out[k] = get_half(b.header, r) * (float)(get_nibble(b.planes, r, k) - 8);
    }
};

struct Q4_1 {
    using File = FileQ4_1;
    static constexpr int kGroupHeader = 0, kBlockHeader = 2 * kHalves, kPlanes = 4 * kPlane;
    struct Weights {
        Quants q;
        VecF scale, minimum;
    };
    PELTON_INLINE static Weights unpack(Block b, int part) {
        return {unpack_nibbles(b.planes, part), row_halves(b.header, part), row_halves(b.header + kHalves, part)};
    }
    PELTON_INLINE static VecF accumulate(const Weights& w, const int8_t* x, const BlockInfo& info, VecF sum) {
        const VecF product = to_float(dot<8>(w.q.w, x));
        sum = fused(product, w.scale * splat(info.scale), sum);
        return fused(w.minimum, splat(info.scaled_sum), sum);
    }
    PELTON_INLINE static void pack(const uint8_t* file, int j, int r, MutableBlock b) {
        uint8_t q[32];
        file += j * File::kBytes;
        File::codes(file, 0, q);
        put_half(b.header, r, file + File::kScale);
        put_half(b.header + kHalves, r, file + File::kMinimum);
        put_nibbles(q, r, b.planes);
    }
    PELTON_INLINE static void dequantize(Block b, int r, float* out) {
        const float scale = get_half(b.header, r), minimum = get_half(b.header + kHalves, r);
        for (int k = 0; k < 32; k++) out[k] = (float)get_nibble(b.planes, r, k) * scale + minimum;
    }
};

struct Q5_0 {
    using File = FileQ5_0;
    static constexpr int kGroupHeader = 0, kBlockHeader = kHalves, kPlanes = 5 * kPlane;
    using Weights = Q4_0::Weights;
    PELTON_INLINE static Weights unpack(Block b, int part) {
        Weights w = Q4_0::unpack(b, part);
        unpack_bits<4>(load_bytes(b.planes + 4 * kPlane + part * kLanes * 4), w.q);
        return w;
    }
    PELTON_INLINE static VecF accumulate(const Weights& w, const int8_t* x, const BlockInfo& info, VecF sum) {
        const VecI offset = splat(info.minus_sum8);
        const VecI product = dot<4>(w.q.w, x) + offset + offset;
        return fused(to_float(product), w.scale * splat(info.scale), sum);
    }
    PELTON_INLINE static void pack(const uint8_t* file, int j, int r, MutableBlock b) {
        uint8_t q[32];
        file += j * File::kBytes;
        File::codes(file, 0, q);
        put_half(b.header, r, file + File::kScale);
        put_nibbles(q, r, b.planes);
        put_bits<4>(q, r, b.planes + 4 * kPlane);
    }
    PELTON_INLINE static void dequantize(Block b, int r, float* out) {
        for (int k = 0; k < 32; k++) {
            const int q = get_nibble(b.planes, r, k) | get_bit(b.planes + 4 * kPlane, r, k) << 4;
            out[k] = get_half(b.header, r) * (float)(q - 16);
        }
    }
};

struct Q5_1 {
    using File = FileQ5_1;
    static constexpr int kGroupHeader = 0, kBlockHeader = 2 * kHalves, kPlanes = 5 * kPlane;
    using Weights = Q4_1::Weights;
    PELTON_INLINE static Weights unpack(Block b, int part) {
        Weights w = Q4_1::unpack(b, part);
        unpack_bits<4>(load_bytes(b.planes + 4 * kPlane + part * kLanes * 4), w.q);
        return w;
    }
    PELTON_INLINE static VecF accumulate(const Weights& w, const int8_t* x, const BlockInfo& info, VecF sum) {
        const VecF product = to_float(dot<4>(w.q.w, x));
        sum = fused(product, w.scale * splat(info.scale), sum);
        return fused(w.minimum, splat(info.scaled_sum), sum);
    }
    PELTON_INLINE static void pack(const uint8_t* file, int j, int r, MutableBlock b) {
        uint8_t q[32];
        file += j * File::kBytes;
        File::codes(file, 0, q);
        put_half(b.header, r, file + File::kScale);
        put_half(b.header + kHalves, r, file + File::kMinimum);
        put_nibbles(q, r, b.planes);
        put_bits<4>(q, r, b.planes + 4 * kPlane);
    }
    PELTON_INLINE static void dequantize(Block b, int r, float* out) {
        const float scale = get_half(b.header, r), minimum = get_half(b.header + kHalves, r);
        for (int k = 0; k < 32; k++) {
            const int q = get_nibble(b.planes, r, k) | get_bit(b.planes + 4 * kPlane, r, k) << 4;
            out[k] = (float)q * scale + minimum;
        }
    }
};

struct Q8_0 {
    using File = FileQ8_0;
    static constexpr int kGroupHeader = 0, kBlockHeader = kHalves, kPlanes = 8 * kPlane;
    struct Weights {
        SignedBytes w[8];
        VecF scale;
    };
    PELTON_INLINE static Weights unpack(Block b, int part) {
        Weights out;
        for (int g = 0; g < 8; g++) out.w[g] = load_signed(b.planes + kPlane * g + part * kLanes * 4);
        out.scale = row_halves(b.header, part);
        return out;
    }
    PELTON_INLINE static VecF accumulate(const Weights& w, const int8_t* x, const BlockInfo& info, VecF sum) {
        const VecF product = to_float(dot(w.w, x, info.minus_sum8));
        return fused(product, w.scale * splat(info.scale), sum);
    }
    PELTON_INLINE static void pack(const uint8_t* file, int j, int r, MutableBlock b) {
        file += j * File::kBytes;
        put_half(b.header, r, file + File::kScale);
        put_bytes(file + File::kValues, r, b.planes);
    }
    PELTON_INLINE static void dequantize(Block b, int r, float* out) {
        for (int k = 0; k < 32; k++) out[k] = get_half(b.header, r) * (float)(int8_t)get_byte(b.planes, r, k);
    }
};

// Codes of four bits to signed weights.
PELTON_INLINE void unpack_nonlinear(const uint8_t* planes, int part, SignedBytes (&out)[8]) {
    const Table table = load_table(IQ4Values::kTable);
    const Quants codes = unpack_nibbles(planes, part);
    for (int g = 0; g < 8; g++) out[g] = look_up(table, codes.w[g]);
}

struct IQ4_NL {
    using File = FileIQ4_NL;
    static constexpr int kGroupHeader = 0, kBlockHeader = kHalves, kPlanes = 4 * kPlane;
    using Weights = Q8_0::Weights;
    PELTON_INLINE static Weights unpack(Block b, int part) {
        Weights out;
        unpack_nonlinear(b.planes, part, out.w);
        out.scale = row_halves(b.header, part);
        return out;
    }
    PELTON_INLINE static VecF accumulate(const Weights& w, const int8_t* x, const BlockInfo& info, VecF sum) {
        return Q8_0::accumulate(w, x, info, sum);
    }
    PELTON_INLINE static void pack(const uint8_t* file, int j, int r, MutableBlock b) { Q4_0::pack(file, j, r, b); }
    PELTON_INLINE static void dequantize(Block b, int r, float* out) {
        for (int k = 0; k < 32; k++) out[k] = get_half(b.header, r) * (float)File::kTable[get_nibble(b.planes, r, k)];
    }
};

}  // namespace pelton::PELTON_ISA
