// Family::Int8: block-quantised weights against int8 activations.
//
// For each part of a tile (as many rows as a vector has lanes) and each block of 32 columns the weights are unpacked to
// registers once and then meet every row of activations; sums of many rows wait in L1. Each sum takes its blocks in
// ascending order whatever the number of rows, so the result does not depend on it.
#include "kernels/portable/int8_kquants.h"
#include "kernels/portable/int8_types.h"
#include "kernels/portable/linear.h"

namespace pelton::PELTON_ISA {
namespace {

constexpr int kGroupBlocks = 8;
constexpr int kChunkRows = 128;                    // rows whose sums wait in L1: 8 KiB
constexpr size_t kChunkBytes = size_t{256} << 10;  // activations that should stay in L2

// Bytes ahead: one row waits for memory alone, and for no longer than it must; more rows compute in between, and
// what is asked for late leaves both idle by turns.
constexpr int prefetch_bytes(int num_rows) { return num_rows == 1 ? 1024 : 2048; }

constexpr int round_up(int n, int unit) { return (n + unit - 1) / unit * unit; }

// Where the groups of a tile stand.
template <class Type>
struct Tile {
    static constexpr int header_bytes(int num_blocks) {
        return round_up(Type::kGroupHeader + num_blocks * Type::kBlockHeader, 64);
    }
    static constexpr int kGroupBytes = header_bytes(kGroupBlocks) + kGroupBlocks * Type::kPlanes;

    static size_t bytes(int num_blocks) {
        const int full = num_blocks / kGroupBlocks, rest = num_blocks % kGroupBlocks;
        return (size_t)full * kGroupBytes + (rest ? (size_t)(header_bytes(rest) + rest * Type::kPlanes) : 0);
    }
    template <class Byte>
    PELTON_INLINE static BlockOf<Byte> block(Byte* group, int num_blocks, int j) {
        return {group, group + Type::kGroupHeader + j * Type::kBlockHeader,
                group + header_bytes(num_blocks) + j * Type::kPlanes};
    }
};

PELTON_INLINE int group_blocks(int group, int num_blocks) {
    const int rest = num_blocks - group * kGroupBlocks;
    return rest < kGroupBlocks ? rest : kGroupBlocks;
}

// Of a later block: a tile is one stream, which goes on into the next tile.
template <class Type>
PELTON_INLINE void prefetch(Block block, int bytes) {
    for (int z = 0; z < Tile<Type>::kGroupBytes / kGroupBlocks; z += 64) __builtin_prefetch(block.planes + z + bytes);
}

template <class Type>
size_t tile_bytes(int K) {
    return Tile<Type>::bytes(K / kBlock);
}

template <class Type>
void pack(const uint8_t* const* rows, int num_rows, int K, uint8_t* tile) {
    const int num_blocks = K / kBlock;
    const size_t file_group = (size_t)Type::File::kBytes * (kGroupBlocks * kBlock / Type::File::kColumns);
    __builtin_memset(tile, 0, tile_bytes<Type>(K));
    for (int g = 0; g * kGroupBlocks < num_blocks; g++) {
        uint8_t* group = tile + (size_t)g * Tile<Type>::kGroupBytes;
        const int count = group_blocks(g, num_blocks);
        for (int r = 0; r < num_rows; r++)
            for (int j = 0; j < count; j++)
                Type::pack(rows[r] + (size_t)g * file_group, j, r, Tile<Type>::block(group, count, j));
    }
}

template <class Type>
void unpack_row(const uint8_t* tile, int r, int K, float* out) {
    const int num_blocks = K / kBlock;
    for (int b = 0; b < num_blocks; b++) {
        const int g = b / kGroupBlocks;
        const uint8_t* group = tile + (size_t)g * Tile<Type>::kGroupBytes;
        Type::dequantize(Tile<Type>::block(group, group_blocks(g, num_blocks), b % kGroupBlocks), r, out + b * kBlock);
    }
}

// All of K for kRows rows, sums in registers: what decoding runs, as fast as memory delivers the weights.
template <class Type, int kRows>
void run_few(const uint8_t* tiles, const Activations& x, float* out, size_t ldo, int t0, int t1) {
    for (int t = t0; t < t1; t++) {
        const uint8_t* group = tiles + (size_t)t * Tile<Type>::bytes(x.num_blocks);
        VecF sum[kRows][kParts];
        for (int m = 0; m < kRows; m++)
            for (int p = 0; p < kParts; p++) sum[m][p] = VecF{};
        for (int b0 = 0; b0 < x.num_blocks; b0 += kGroupBlocks, group += Tile<Type>::kGroupBytes) {
            const int count = group_blocks(b0 / kGroupBlocks, x.num_blocks);
            for (int j = 0; j < count; j++) {
                const Block block = Tile<Type>::block(group, count, j);
                prefetch<Type>(block, prefetch_bytes(kRows));
                const ActivationBlock act = x.block(0, b0 + j);
                for (int p = 0; p < kParts; p++) {
                    const typename Type::Weights w = Type::unpack(block, p);
                    for (int m = 0; m < kRows; m++)
                        sum[m][p] = Type::accumulate(w, act.values + m * kBlock, act.info[m], sum[m][p]);
                }
            }
        }
        for (int m = 0; m < kRows; m++)
            for (int p = 0; p < kParts; p++)
                store(out + (size_t)m * ldo + (size_t)(t * kTileRows + p * kLanes), sum[m][p]);
    }
}

// A chunk of activations: some panels, some groups of columns, small enough to stay in L2 over all tiles.
struct Chunk {
    int panel0, panel1, group0, group1;
};

template <class Type>
void add_chunk(const uint8_t* tile, const Activations& x, const Chunk& chunk, float* sums) {
    for (int g = chunk.group0; g < chunk.group1; g++) {
        const uint8_t* group = tile + (size_t)g * Tile<Type>::kGroupBytes;
        const int count = group_blocks(g, x.num_blocks);
        for (int j = 0; j < count; j++) {
            const Block block = Tile<Type>::block(group, count, j);
            prefetch<Type>(block, prefetch_bytes(kPanelRows));
            for (int p = 0; p < kParts; p++) {
                const typename Type::Weights w = Type::unpack(block, p);
                float* sum = sums + p * kLanes;
                for (int panel = chunk.panel0; panel < chunk.panel1; panel++) {
                    const ActivationBlock act = x.block(panel, g * kGroupBlocks + j);
                    const int rows = x.panel_rows(panel);
                    for (int m = 0; m < rows; m++, sum += kTileRows)
                        store(sum, Type::accumulate(w, act.values + m * kBlock, act.info[m], load<VecF>(sum)));
                }
            }
        }
    }
}

template <class Type>
void run_chunk(const uint8_t* tiles, const Activations& x, const Chunk& chunk, float* out, size_t ldo, int t0, int t1,
               float* sums) {
    const int m0 = chunk.panel0 * kPanelRows;
    const int rows = (chunk.panel1 - 1) * kPanelRows + x.panel_rows(chunk.panel1 - 1) - m0;
    for (int t = t0; t < t1; t++) {
        float* columns = out + (size_t)m0 * ldo + (size_t)t * kTileRows;
        for (int m = 0; m < rows; m++)
            for (int i = 0; i < kTileRows; i++)
                sums[m * kTileRows + i] = chunk.group0 ? columns[(size_t)m * ldo + (size_t)i] : 0.0f;
        add_chunk<Type>(tiles + (size_t)t * Tile<Type>::bytes(x.num_blocks), x, chunk, sums);
        for (int m = 0; m < rows; m++)
            for (int i = 0; i < kTileRows; i++) columns[(size_t)m * ldo + (size_t)i] = sums[m * kTileRows + i];
    }
}

template <class Type>
void run_many(const uint8_t* tiles, const Activations& x, float* out, size_t ldo, int t0, int t1, uint8_t* scratch) {
    constexpr int kChunkPanels = kChunkRows / kPanelRows;
    const auto least = [](int a, int b) { return a < b ? a : b; };
    // Few rows take all columns at once: each tile is read from end to end. Where a pass leaves the rest of a tile to
    // the next one, what is prefetched across the gap is not what comes, and memory is waited for.
    const size_t group_bytes = (size_t)least(x.num_rows, kChunkRows) * kRowBlockBytes * kGroupBlocks;
    const int chunk_groups = (int)(kChunkBytes / group_bytes);
    const int num_panels = (x.num_rows + kPanelRows - 1) / kPanelRows;
    const int num_groups = (x.num_blocks + kGroupBlocks - 1) / kGroupBlocks;
    for (int p = 0; p < num_panels; p += kChunkPanels)
        for (int g = 0; g < num_groups; g += chunk_groups) {
            const Chunk chunk = {p, least(p + kChunkPanels, num_panels), g, least(g + chunk_groups, num_groups)};
            run_chunk<Type>(tiles, x, chunk, out, ldo, t0, t1, (float*)scratch);
        }
}

template <class Type>
void run(const uint8_t* tiles, const uint8_t* act, int M, int K, float* out, size_t ldo, int t0, int t1,
         uint8_t* scratch) {
    const Activations x{act, M, K / kBlock};
    switch (M) {
        case 1:
            return run_few<Type, 1>(tiles, x, out, ldo, t0, t1);
        case 2:
            return run_few<Type, 2>(tiles, x, out, ldo, t0, t1);
        default:
            return run_many<Type>(tiles, x, out, ldo, t0, t1, scratch);
    }
}

template <class Type>
constexpr LinearKernel kernel = {Family::Int8, tile_bytes<Type>, pack<Type>, unpack_row<Type>, run<Type>};

}  // namespace

const LinearKernel* int8_linear(WeightType type) {
    switch (type) {
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

}  // namespace pelton::PELTON_ISA
