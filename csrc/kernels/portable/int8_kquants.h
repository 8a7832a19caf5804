// int8_kquants.h: GGML's K-quants and IQ4_XS as the Int8 kernels see them. A group of eight blocks is one super-block
// of 256.
//
// The integer scales of sub-blocks join the exact integer dot, so a block adds one fma with d x activation scale. A
// minimum is a second fma: minimum x scaled sum of x; Q2_K, which has two minima per block, sums them as integers
// first.
#pragma once

#include "kernels/portable/int8_types.h"

namespace pelton::PELTON_ISA {

struct Q2_K {
    using File = FileQ2_K;
    static constexpr int kGroupHeader = 2 * kHalves, kBlockHeader = 2 * kTileRows, kPlanes = 2 * kPlane;
    struct Weights {
        Bytes w[8];
        Scale first, second;
        Pairs minima;
        VecF scale, minus_minimum_scale;
    };
    PELTON_INLINE static Weights unpack(Block b, int part) {
        Weights out;
        for (int p = 0; p < 2; p++) {
            const Bytes plane = load_bytes(b.planes + kPlane * p + part * kLanes * 4);
            out.w[4 * p] = and_mask(plane, 3);
            out.w[4 * p + 1] = and_mask(shift<-2>(plane), 3);
            out.w[4 * p + 2] = and_mask(shift<-4>(plane), 3);
            out.w[4 * p + 3] = and_mask(shift<-6>(plane), 3);
        }
        const VecI first = load_u8(b.header + part * kLanes), second = load_u8(b.header + kTileRows + part * kLanes);
        out.first = scale_of(first & 15);
        out.second = scale_of(second & 15);
        out.minima = pairs(first >> 4, second >> 4);
        out.scale = row_halves(b.group, part);
        out.minus_minimum_scale = -row_halves(b.group + kHalves, part);
        return out;
    }
    PELTON_INLINE static VecF accumulate(const Weights& w, const int8_t* x, const BlockInfo& info, VecF sum) {
        const VecF product = to_float(dot<4>(w.w, x, w.first, w.second));
        const VecF minimum = to_float(dot_halves(w.minima, info.half_sums));
        sum = fused(product, w.scale * splat(info.scale), sum);
        return fused(minimum, w.minus_minimum_scale * splat(info.scale), sum);
    }
    PELTON_INLINE static void pack(const uint8_t* file, int j, int r, MutableBlock b) {
        uint8_t q[32];
        File::codes(file, j, q);
        put_pairs<0>(q, r, b.planes);
        put_half(b.group, r, file + File::kScale);
        put_half(b.group + kHalves, r, file + File::kMinimum);
        for (int h = 0; h < 2; h++)
            b.header[h * kTileRows + r] = (uint8_t)(File::scale(file, 2 * j + h) | File::minimum(file, 2 * j + h) << 4);
    }
    PELTON_INLINE static void dequantize(Block b, int r, float* out) {
        for (int k = 0; k < 32; k++) {
            const int scales = b.header[k / 16 * kTileRows + r];
            const float scale = get_half(b.group, r) * (float)(scales & 15);
            const float minimum = get_half(b.group + kHalves, r) * (float)(scales >> 4);
            out[k] = scale * (float)get_pair(b.planes, r, k) - minimum;
        }
    }
};

// Signed weights with an integer scale (signed) per 16 columns: Q3_K and Q6_K.
struct SignedHalves {
    Quants q;
    Scale first, second;
    Pairs offset;  // -kOffset x scale, to meet the half sums of x
    VecF scale;
};
template <int kOffset>
PELTON_INLINE void load_half_scales(Block b, int part, SignedHalves& out) {
    const VecI first = load_s8(b.header + part * kLanes), second = load_s8(b.header + kTileRows + part * kLanes);
    out.first = scale_of(first);
    out.second = scale_of(second);
    out.offset = pairs(first * -kOffset, second * -kOffset);
    out.scale = row_halves(b.group, part);
}
template <int kSafe>
PELTON_INLINE VecF add_signed_halves(const SignedHalves& w, const int8_t* x, const BlockInfo& info, VecF sum) {
    const VecI product = dot<kSafe>(w.q.w, x, w.first, w.second) + dot_halves(w.offset, info.half_sums);
    return fused(to_float(product), w.scale * splat(info.scale), sum);
}

struct Q3_K {
    using File = FileQ3_K;
    static constexpr int kGroupHeader = kHalves, kBlockHeader = 2 * kTileRows, kPlanes = 3 * kPlane;
    using Weights = SignedHalves;
    PELTON_INLINE static Weights unpack(Block b, int part) {
        Weights out;
        for (int p = 0; p < 2; p++) {
            const Bytes plane = load_bytes(b.planes + kPlane * p + part * kLanes * 4);
            out.q.w[4 * p] = and_mask(plane, 3);
            out.q.w[4 * p + 1] = and_mask(shift<-2>(plane), 3);
            out.q.w[4 * p + 2] = and_mask(shift<-4>(plane), 3);
            out.q.w[4 * p + 3] = and_mask(shift<-6>(plane), 3);
        }
        unpack_bits<2>(load_bytes(b.planes + 2 * kPlane + part * kLanes * 4), out.q);
        load_half_scales<4>(b, part, out);
        return out;
    }
    PELTON_INLINE static VecF accumulate(const Weights& w, const int8_t* x, const BlockInfo& info, VecF sum) {
        return add_signed_halves<4>(w, x, info, sum);
    }
    PELTON_INLINE static void pack(const uint8_t* file, int j, int r, MutableBlock b) {
        uint8_t q[32];
        File::codes(file, j, q);
        put_pairs<0>(q, r, b.planes);
        put_bits<2>(q, r, b.planes + 2 * kPlane);
        put_half(b.group, r, file + File::kScale);
        for (int h = 0; h < 2; h++) b.header[h * kTileRows + r] = File::scale(file, 2 * j + h);
    }
    PELTON_INLINE static void dequantize(Block b, int r, float* out) {
        for (int k = 0; k < 32; k++) {
            const int q = get_pair(b.planes, r, k) | get_bit(b.planes + 2 * kPlane, r, k) << 2;
            out[k] = get_half(b.group, r) * (float)(int8_t)b.header[k / 16 * kTileRows + r] * (float)(q - 4);
        }
    }
};

struct Q6_K {
    using File = FileQ6_K;
    static constexpr int kGroupHeader = kHalves, kBlockHeader = 2 * kTileRows, kPlanes = 6 * kPlane;
    using Weights = SignedHalves;
    PELTON_INLINE static Weights unpack(Block b, int part) {
        Weights out;
        out.q = unpack_nibbles(b.planes, part);
        for (int p = 0; p < 2; p++) {
            const Bytes plane = load_bytes(b.planes + kPlane * (4 + p) + part * kLanes * 4);
            Bytes* w = out.q.w + 4 * p;
            w[0] = w[0] | and_mask(shift<4>(plane), 0x30);
            w[1] = w[1] | and_mask(shift<2>(plane), 0x30);
            w[2] = w[2] | and_mask(plane, 0x30);
            w[3] = w[3] | and_mask(shift<-2>(plane), 0x30);
        }
        load_half_scales<32>(b, part, out);
        return out;
    }
    PELTON_INLINE static VecF accumulate(const Weights& w, const int8_t* x, const BlockInfo& info, VecF sum) {
        return add_signed_halves<2>(w, x, info, sum);
    }
    PELTON_INLINE static void pack(const uint8_t* file, int j, int r, MutableBlock b) {
        uint8_t q[32];
        File::codes(file, j, q);
        put_nibbles(q, r, b.planes);
        put_pairs<4>(q, r, b.planes + 4 * kPlane);
        put_half(b.group, r, file + File::kScale);
        for (int h = 0; h < 2; h++) b.header[h * kTileRows + r] = File::scale(file, 2 * j + h);
    }
    PELTON_INLINE static void dequantize(Block b, int r, float* out) {
        for (int k = 0; k < 32; k++) {
            const int q = get_nibble(b.planes, r, k) | get_pair(b.planes + 4 * kPlane, r, k) << 4;
            out[k] = get_half(b.group, r) * (float)(int8_t)b.header[k / 16 * kTileRows + r] * (float)(q - 32);
        }
    }
};

struct Q4_K {
    using File = FileQ4_K;
    static constexpr int kGroupHeader = 2 * kHalves, kBlockHeader = 2 * kTileRows, kPlanes = 4 * kPlane;
    struct Weights {
        Quants q;
        Scale block_scale;
        VecF scale, minus_minimum;
    };
    PELTON_INLINE static Weights unpack(Block b, int part) {
        const VecI minimum = load_u8(b.header + kTileRows + part * kLanes);
        return {unpack_nibbles(b.planes, part), scale_of(load_u8(b.header + part * kLanes)), row_halves(b.group, part),
                -row_halves(b.group + kHalves, part) * to_float(minimum)};
    }
    template <int kSafe = 8>
    PELTON_INLINE static VecF accumulate(const Weights& w, const int8_t* x, const BlockInfo& info, VecF sum) {
        const VecF product = to_float(dot<kSafe>(w.q.w, x, w.block_scale));
        sum = fused(product, w.scale * splat(info.scale), sum);
        return fused(w.minus_minimum, splat(info.scaled_sum), sum);
    }
    PELTON_INLINE static void pack(const uint8_t* file, int j, int r, MutableBlock b) {
        uint8_t q[32];
        File::codes(file, j, q);
        put_nibbles(q, r, b.planes);
        put_half(b.group, r, file + File::kScale);
        put_half(b.group + kHalves, r, file + File::kMinimum);
        b.header[r] = File::scale(file, j);
        b.header[kTileRows + r] = File::minimum(file, j);
    }
    PELTON_INLINE static void dequantize(Block b, int r, float* out) {
        const float scale = get_half(b.group, r) * (float)b.header[r];
        const float minimum = get_half(b.group + kHalves, r) * (float)b.header[kTileRows + r];
        for (int k = 0; k < 32; k++) out[k] = scale * (float)get_nibble(b.planes, r, k) - minimum;
    }
};

struct Q5_K {
    using File = FileQ5_K;
    static constexpr int kGroupHeader = 2 * kHalves, kBlockHeader = 2 * kTileRows, kPlanes = 5 * kPlane;
    using Weights = Q4_K::Weights;
    PELTON_INLINE static Weights unpack(Block b, int part) {
        Weights w = Q4_K::unpack(b, part);
        unpack_bits<4>(load_bytes(b.planes + 4 * kPlane + part * kLanes * 4), w.q);
        return w;
    }
    PELTON_INLINE static VecF accumulate(const Weights& w, const int8_t* x, const BlockInfo& info, VecF sum) {
        return Q4_K::accumulate<4>(w, x, info, sum);
    }
    PELTON_INLINE static void pack(const uint8_t* file, int j, int r, MutableBlock b) {
        uint8_t q[32];
        File::codes(file, j, q);
        put_nibbles(q, r, b.planes);
        put_bits<4>(q, r, b.planes + 4 * kPlane);
        put_half(b.group, r, file + File::kScale);
        put_half(b.group + kHalves, r, file + File::kMinimum);
        b.header[r] = File::scale(file, j);
        b.header[kTileRows + r] = File::minimum(file, j);
    }
    PELTON_INLINE static void dequantize(Block b, int r, float* out) {
        const float scale = get_half(b.group, r) * (float)b.header[r];
        const float minimum = get_half(b.group + kHalves, r) * (float)b.header[kTileRows + r];
        for (int k = 0; k < 32; k++) {
            const int q = get_nibble(b.planes, r, k) | get_bit(b.planes + 4 * kPlane, r, k) << 4;
            out[k] = scale * (float)q - minimum;
        }
    }
};

struct IQ4_XS {
    using File = FileIQ4_XS;
    static constexpr int kGroupHeader = kHalves, kBlockHeader = kTileRows, kPlanes = 4 * kPlane;
    struct Weights {
        SignedBytes w[8];
        Scale block_scale;
        VecF scale;
    };
    PELTON_INLINE static Weights unpack(Block b, int part) {
        Weights out;
        unpack_nonlinear(b.planes, part, out.w);
        out.block_scale = scale_of(load_s8(b.header + part * kLanes));
        out.scale = row_halves(b.group, part);
        return out;
    }
    PELTON_INLINE static VecF accumulate(const Weights& w, const int8_t* x, const BlockInfo& info, VecF sum) {
        const VecF product = to_float(dot(w.w, x, info.minus_sum8, w.block_scale));
        return fused(product, w.scale * splat(info.scale), sum);
    }
    PELTON_INLINE static void pack(const uint8_t* file, int j, int r, MutableBlock b) {
        uint8_t q[32];
        File::codes(file, j, q);
        put_nibbles(q, r, b.planes);
        put_half(b.group, r, file + File::kScale);
        b.header[r] = File::scale(file, j);
    }
    PELTON_INLINE static void dequantize(Block b, int r, float* out) {
        const float scale = get_half(b.group, r) * (float)(int8_t)b.header[r];
        for (int k = 0; k < 32; k++) out[k] = scale * (float)File::kTable[get_nibble(b.planes, r, k)];
    }
};

}  // namespace pelton::PELTON_ISA
