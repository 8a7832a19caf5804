// Family::BFloat16: weights of every type, rounded to bf16, against bf16 activations on tile registers.
#include "kernels/amx/linear.h"

#include "kernels/amx/panel.h"
#include "kernels/amx/ring.h"

namespace pelton::amx {
namespace {

constexpr int kMaxRingRows = 96;  // above, unpacking into L2 once is cheaper than moving the sums of many passes

template <class Weights>
size_t tile_bytes(int K) {
    return Layout<Weights>::tile_bytes(K);
}

template <class Weights>
void pack(const uint8_t* const* rows, int num_rows, int K, uint8_t* tile) {
    using Place = Layout<Weights>;
    __builtin_memset(tile, 0, Place::tile_bytes(K));
    for (int r = 0; r < num_rows; r++) {
        const RowScale row = Weights::scale_row(rows[r], K);
        store_as(tile + 4 * r, row.scale);
        if constexpr (Weights::kIsWide) {
            for (int k = 0; k < K; k++) {
                uint8_t* pair = tile + Place::fields(k / kStepColumns) + 64 * (k % kStepColumns / 2) + 4 * r;
                const auto weight = load_as<uint16_t>(rows[r] + 2 * static_cast<size_t>(k));
                store_as(pair + 2 * (k % 2), Weights::pack(weight, row.power));
            }
        } else {
            using File = typename Weights::File;
            const uint8_t* block = rows[r];
            for (int k = 0; k < K; k += File::kColumns, block += File::kBytes) {
                const int step = k / kStepColumns;
                Weights::pack(block, step, r, row.power, tile + Place::header(step), tile + Place::fields(step));
            }
        }
    }
}

template <class Weights>
void unpack_row(const uint8_t* tile, int r, int K, float* out) {
    alignas(64) uint16_t operand[kTileElements];
    const float scale = load_as<float>(tile + 4 * r) * kActivationScale;
    for (int step = 0; step < num_steps(K); step++) {
        unpack_step<Weights>(tile, step, operand);
        for (int k = 0; k < kStepColumns && step * kStepColumns + k < K; k++) {
            const uint16_t weight = operand[k / 2 * 32 + 2 * r + k % 2];
            const bool is_subnormal = (weight & 0x7f80) == 0;  // zero to the tile product
            out[step * kStepColumns + k] = scale * bf16_to_float(is_subnormal ? weight & 0x8000 : weight);
        }
    }
}

template <class Weights>
void run(const uint8_t* tiles, const uint8_t* act, int M, int K, float* out, size_t ldo, int t0, int t1,
         uint8_t* scratch) {
    const Activations x{act, M, num_steps(K)};
    const Output output{out, ldo};
    const int second = M <= 2 * kRows && M > kRows ? M - kRows : kRows;
    const TileRegisters registers(M < kRows ? M : kRows, second);
    if (M > kMaxRingRows) {
        Panel<Weights>(tiles, x, K, output, scratch).run(t0, t1);
        return;
    }
    const int paired = t0 + (t1 - t0) / 2 * 2;
    if (t0 < paired) Ring<Weights, 2>(tiles, x, K, output, scratch).run(t0, paired);
    if (paired < t1) Ring<Weights, 1>(tiles, x, K, output, scratch).run(paired, t1);
}

template <class Weights>
constexpr LinearKernel kernel = {Family::BFloat16, tile_bytes<Weights>, pack<Weights>, unpack_row<Weights>,
                                 run<Weights>};

}  // namespace

const LinearKernel* bf16_linear(WeightType type) {
    switch (type) {
        case WeightType::F16:
            return &kernel<Float16>;
        case WeightType::BF16:
            return &kernel<BFloat16>;
        case WeightType::Q4_0:
            return &kernel<Q4_0>;
        case WeightType::Q4_1:
            return &kernel<Q4_1>;
        case WeightType::Q5_0:
            return &kernel<Q5_0>;
        case WeightType::Q5_1:
            return &kernel<Q5_1>;
        case WeightType::Q8_0:
            return &kernel<Q8_0>;
        case WeightType::Q2_K:
            return &kernel<Q2_K>;
        case WeightType::Q3_K:
            return &kernel<Q3_K>;
        case WeightType::Q4_K:
            return &kernel<Q4_K>;
        case WeightType::Q5_K:
            return &kernel<Q5_K>;
        case WeightType::Q6_K:
            return &kernel<Q6_K>;
        case WeightType::IQ4_NL:
            return &kernel<IQ4_NL>;
        case WeightType::IQ4_XS:
            return &kernel<IQ4_XS>;
        default:
            return nullptr;
    }
}

}  // namespace pelton::amx
