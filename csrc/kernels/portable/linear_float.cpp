// Family::Float32: weights F32, F16 and BF16 against float32 activations.
//
// A tile is K runs of 16 weights, one per row. out[m][n] starts at zero and takes one fused multiply-add per column,
// ascending, whatever M is.
#include "kernels/portable/dot.h"
#include "kernels/portable/linear.h"

namespace pelton::PELTON_ISA {
namespace {

constexpr int kColumns = 256;  // columns of a tile that are widened to scratch at once: 16 KiB, half of L1

struct F32 {
    using Element = float;
    static constexpr bool kIsWide = true;
    PELTON_INLINE static VecF load_lanes(const float* p) { return load(p); }
    PELTON_INLINE static float widen(float value) { return value; }
};
struct F16 {
    using Element = uint16_t;
    static constexpr bool kIsWide = false;
    PELTON_INLINE static VecF load_lanes(const uint16_t* p) { return load_half(p); }
    PELTON_INLINE static float widen(uint16_t value) { return half_to_float(value); }
};
struct BF16 {
    using Element = uint16_t;
    static constexpr bool kIsWide = false;
    PELTON_INLINE static VecF load_lanes(const uint16_t* p) { return load_bf16(p); }
    PELTON_INLINE static float widen(uint16_t value) { return bf16_to_float(value); }
};

template <class Type>
size_t tile_bytes(int K) {
    return ((size_t)K * kTileRows * sizeof(typename Type::Element) + 63) / 64 * 64;
}

template <class Type>
void pack(const uint8_t* const* rows, int num_rows, int K, uint8_t* tile) {
    using Element = typename Type::Element;
    Element* out = (Element*)tile;
    for (int k = 0; k < K; k++)
        for (int r = 0; r < kTileRows; r++)
            out[k * kTileRows + r] =
                r < num_rows ? load_as<Element>(rows[r] + sizeof(Element) * (size_t)k) : Element{0};
}

template <class Type>
void unpack_row(const uint8_t* tile, int r, int K, float* out) {
    const auto* in = (const typename Type::Element*)tile;
    for (int k = 0; k < K; k++) out[k] = Type::widen(in[k * kTileRows + r]);
}

// kRows rows times one tile, columns [0, num_columns) of `w`; sums come from and go to `out`, or start at zero.
template <class Type, int kRows>
void multiply(const typename Type::Element* w, const float* x, size_t ldx, int num_columns, bool is_first, float* out,
              size_t ldo) {
    VecF sum[kRows][kParts];
    for (int m = 0; m < kRows; m++)
        for (int p = 0; p < kParts; p++) sum[m][p] = is_first ? VecF{} : load<VecF>(out + (size_t)m * ldo + p * kLanes);
    for (int k = 0; k < num_columns; k++) {
        VecF weight[kParts];
        for (int p = 0; p < kParts; p++) weight[p] = Type::load_lanes(w + k * kTileRows + p * kLanes);
        for (int m = 0; m < kRows; m++) {
            const VecF value = splat(x[(size_t)m * ldx + (size_t)k]);
            for (int p = 0; p < kParts; p++) sum[m][p] = fused(value, weight[p], sum[m][p]);
        }
    }
    for (int m = 0; m < kRows; m++)
        for (int p = 0; p < kParts; p++) store(out + (size_t)m * ldo + p * kLanes, sum[m][p]);
}

template <class Type>
void multiply_rows(const typename Type::Element* w, const float* x, int M, size_t ldx, int num_columns, bool is_first,
                   float* out, size_t ldo) {
    constexpr int kRows = 6;
    int m = 0;
    for (; m + kRows <= M; m += kRows)
        multiply<Type, kRows>(w, x + (size_t)m * ldx, ldx, num_columns, is_first, out + (size_t)m * ldo, ldo);
    x += (size_t)m * ldx;
    out += (size_t)m * ldo;
    switch (M - m) {
        case 5:
            return multiply<Type, 5>(w, x, ldx, num_columns, is_first, out, ldo);
        case 4:
            return multiply<Type, 4>(w, x, ldx, num_columns, is_first, out, ldo);
        case 3:
            return multiply<Type, 3>(w, x, ldx, num_columns, is_first, out, ldo);
        case 2:
            return multiply<Type, 2>(w, x, ldx, num_columns, is_first, out, ldo);
        case 1:
            return multiply<Type, 1>(w, x, ldx, num_columns, is_first, out, ldo);
    }
}

template <class Type>
void run(const uint8_t* tiles, const uint8_t* act, int M, int K, float* out, size_t ldo, int t0, int t1,
         uint8_t* scratch) {
    using Element = typename Type::Element;
    const float* x = (const float*)act;
    for (int t = t0; t < t1; t++) {
        const auto* tile = (const Element*)(tiles + (size_t)t * tile_bytes<Type>(K));
        float* column = out + (size_t)t * kTileRows;
        for (int k0 = 0; k0 < K; k0 += kColumns) {
            const int num = K - k0 < kColumns ? K - k0 : kColumns;
            const Element* w = tile + (size_t)k0 * kTileRows;
            if (Type::kIsWide || M <= 8) {
                multiply_rows<Type>(w, x + k0, M, (size_t)K, num, k0 == 0, column, ldo);
            } else {
                float* wide = (float*)scratch;
                for (int i = 0; i < num * kTileRows; i += kLanes) store(wide + i, Type::load_lanes(w + i));
                multiply_rows<F32>(wide, x + k0, M, (size_t)K, num, k0 == 0, column, ldo);
            }
        }
    }
}

template <class Type>
constexpr LinearKernel kernel = {Family::Float32, tile_bytes<Type>, pack<Type>, unpack_row<Type>, run<Type>};

}  // namespace

size_t float32_bytes(int M, int K) { return (size_t)M * (size_t)K * sizeof(float); }

void float32_prepare(const float* x, size_t ldx, int m0, int m1, int, int K, uint8_t* act) {
    for (int m = m0; m < m1; m++)
        __builtin_memcpy(act + (size_t)m * (size_t)K * sizeof(float), x + (size_t)m * ldx, (size_t)K * sizeof(float));
}

const LinearKernel* float32_linear(WeightType type) {
    switch (type) {
        case WeightType::F32:
            return &kernel<F32>;
        case WeightType::F16:
            return &kernel<F16>;
        case WeightType::BF16:
            return &kernel<BF16>;
        default:
            return nullptr;
    }
}

}  // namespace pelton::PELTON_ISA
