// Linear kernels. For every weight type and some shapes,
//   rows   each row of a packed weight comes back as the generic kernels give it (BFloat16: as its definition does);
//   alone  the outputs of a row are the same bits whatever the number of rows and the split of tiles;
//   value  they are what they should be: Int8 and Float32 the bits of the generic kernels, BFloat16 those of its
//          definition (tiles.h).
#include <cstring>

#include "tiles.h"

namespace selftest {

using namespace pelton;

namespace {

struct Type {
    WeightType id;
    const char* name;
    int columns, bytes;       // of a block
    std::vector<int> halves;  // where a block's binary16 scales stand
    std::vector<int> shapes;  // K
};

const std::vector<int> kLegacyShapes = {32, 576, 1120}, kQuantShapes = {256, 1280}, kFloatShapes = {50, 896, 1056};
const Type kTypes[] = {
    {WeightType::F32, "F32", 1, 4, {}, {50, 896}},
    {WeightType::F16, "F16", 1, 2, {}, kFloatShapes},
    {WeightType::BF16, "BF16", 1, 2, {}, kFloatShapes},
    {WeightType::Q4_0, "Q4_0", 32, 18, {0}, kLegacyShapes},
    {WeightType::Q4_1, "Q4_1", 32, 20, {0, 2}, kLegacyShapes},
    {WeightType::Q5_0, "Q5_0", 32, 22, {0}, kLegacyShapes},
    {WeightType::Q5_1, "Q5_1", 32, 24, {0, 2}, kLegacyShapes},
    {WeightType::Q8_0, "Q8_0", 32, 34, {0}, kLegacyShapes},
    {WeightType::Q2_K, "Q2_K", 256, 84, {80, 82}, kQuantShapes},
    {WeightType::Q3_K, "Q3_K", 256, 110, {108}, kQuantShapes},
    {WeightType::Q4_K, "Q4_K", 256, 144, {0, 2}, kQuantShapes},
    {WeightType::Q5_K, "Q5_K", 256, 176, {0, 2}, kQuantShapes},
    {WeightType::Q6_K, "Q6_K", 256, 210, {208}, kQuantShapes},
    {WeightType::IQ4_NL, "IQ4_NL", 32, 18, {0}, kLegacyShapes},
    {WeightType::IQ4_XS, "IQ4_XS", 256, 136, {0}, kQuantShapes},
};

constexpr int kN = 69, kTiles = (kN + kTileRows - 1) / kTileRows, kColumns = kTiles * kTileRows, kM = 100;

// Any bits as quants; scales over 28 binades, a few of them zero or subnormal, and one of row 3 infinite.
std::vector<uint8_t> random_weights(const Type& type, int K, Random& random) {
    std::vector<uint8_t> bytes(static_cast<size_t>(kN) * static_cast<size_t>(K / type.columns * type.bytes));
    for (auto& byte : bytes) byte = static_cast<uint8_t>(random());
    for (size_t block = 0; block < bytes.size(); block += static_cast<size_t>(type.bytes)) {
        uint8_t* at = bytes.data() + block;
        for (const int half : type.halves)
            store_as(at + half, static_cast<uint16_t>((random() & 0x83ff) | random() % 28 << 10));
        if (type.id == WeightType::F16) store_as(at, static_cast<uint16_t>((random() & 0x83ff) | random() % 20 << 10));
        if (type.id == WeightType::BF16)
            store_as(at, static_cast<uint16_t>((random() & 0x807f) | (110 + random() % 20) << 7));
        if (type.id == WeightType::F32)
            store_as(at, static_cast<float>(static_cast<int>(random() % 2001) - 1000) * 1e-3f);
    }
    if (!type.halves.empty()) store_as(bytes.data() + bytes.size() / kN * 3 + type.halves[0], uint16_t{0x7c00});
    return bytes;
}

std::vector<float> random_inputs(int K, Random& random) {
    std::vector<float> x(static_cast<size_t>(kM) * static_cast<size_t>(K));
    for (auto& value : x) {
        value = static_cast<float>(static_cast<int>(random() % 65537) - 32768) / 8192.0f;
        if (random() % 100 == 0) value *= 50.0f;
        if (random() % 100 == 0) value = 0.0f;
    }
    return x;
}

// One kernel with a packed weight.
class Weight {
  public:
    Weight(const KernelTable& table, const Type& type, const std::vector<uint8_t>& file, int K)
        : kernel(*table.linear.linear(type.id)),
          activation_(table.linear.activations[static_cast<int>(kernel.family)]),
          K_(K),
          tile_bytes_(kernel.tile_bytes(K)),
          tiles_(tile_bytes_ * kTiles),
          scratch_(kScratchBytes) {
        const size_t row_bytes = file.size() / kN;
        for (int t = 0; t < kTiles; t++) {
            const int rows = kN - t * kTileRows < kTileRows ? kN - t * kTileRows : kTileRows;
            const uint8_t* pointers[kTileRows];
            for (int r = 0; r < rows; r++)
                pointers[r] = file.data() + static_cast<size_t>(t * kTileRows + r) * row_bytes;
            kernel.pack(pointers, rows, K, tile(t));
        }
    }
    std::vector<float> row(int n) {
        std::vector<float> out(static_cast<size_t>(K_));
        kernel.unpack_row(tile(n / kTileRows), n % kTileRows, K_, out.data());
        return out;
    }
    // [M, kColumns]; the tiles are run in two parts, the activations prepared in two.
    std::vector<float> run(const float* x, int M, int split) {
        Bytes act(activation_.bytes(M, K_));
        const int m = M > 16 ? 16 : M;
        activation_.prepare(x, static_cast<size_t>(K_), 0, m, M, K_, act.data());
        if (m < M) activation_.prepare(x, static_cast<size_t>(K_), m, M, M, K_, act.data());
        std::vector<float> out(static_cast<size_t>(M) * kColumns, 1e30f);
        const auto part = [&](int t0, int t1) {
            if (t0 < t1) kernel.run(tiles_.data(), act.data(), M, K_, out.data(), kColumns, t0, t1, scratch_.data());
        };
        part(0, split);
        part(split, kTiles);
        return out;
    }
    const LinearKernel& kernel;

  private:
    uint8_t* tile(int t) { return tiles_.data() + static_cast<size_t>(t) * tile_bytes_; }
    const ActivationKernel& activation_;
    const int K_;
    const size_t tile_bytes_;
    Bytes tiles_, scratch_;
};

void check_shape(const KernelTable& table, const KernelTable& generic, const Type& type, int K, Counts& counts) {
    Random random{static_cast<uint64_t>(K) * 1000 + static_cast<uint64_t>(type.id)};
    const auto file = random_weights(type, K, random);
    const auto x = random_inputs(K, random);
    Weight weight(table, type, file, K), plain(generic, type, file, K);
    const bool is_bf16 = weight.kernel.family == Family::BFloat16;

    std::vector<TileRow> rows;
    bool rows_same = true;
    for (int n = 0; n < kN; n++) {
        auto expected = plain.row(n);
        if (is_bf16) {
            rows.push_back(tile_row(type.id, file.data() + static_cast<size_t>(n) * (file.size() / kN), K));
            for (size_t k = 0; k < expected.size(); k++)
                expected[k] = rows.back().operands[k] * (rows.back().scale * 0x1p48f);
        }
        const auto row = weight.row(n);
        for (size_t k = 0; k < row.size(); k++) rows_same &= is_same(row[k], expected[k]);
    }
    counts.add(rows_same, type.name, "rows", K);

    std::vector<float> alone;
    for (int m = 0; m < kM; m++) {
        const auto out = weight.run(x.data() + static_cast<size_t>(m) * static_cast<size_t>(K), 1, m % (kTiles + 1));
        alone.insert(alone.end(), out.begin(), out.end());
    }
    for (const int M : {2, 5, 16, 17, 32, 33, 49, 96, 100}) {
        const auto out = weight.run(x.data(), M, M % kTiles);
        counts.add(!std::memcmp(out.data(), alone.data(), out.size() * sizeof(float)), type.name, "alone",
                   1000 * K + M);
    }

    bool values_same = true;
    const auto expected = is_bf16 ? std::vector<float>() : plain.run(x.data(), kM, 0);
    for (int m = 0; m < kM; m += 3)
        for (int n = 0; n < kN; n++) {
            const size_t at = static_cast<size_t>(m) * kColumns + static_cast<size_t>(n);
            const float* inputs = x.data() + static_cast<size_t>(m) * static_cast<size_t>(K);
            const float want = is_bf16 ? tile_product(inputs, rows[static_cast<size_t>(n)]) : expected[at];
            values_same &= is_same(alone[at], want);
        }
    counts.add(values_same, type.name, "value", K);
}

}  // namespace

void check_linear(const KernelTable& table, const KernelTable& plain, Counts& counts,
                  bool (*is_wanted)(const char* type)) {
    for (const Type& type : kTypes) {
        if (!is_wanted(type.name)) continue;
        if (!table.linear.linear(type.id) || !plain.linear.linear(type.id)) {
            std::printf("%s %s: no kernel\n", table.isa, type.name);
            continue;
        }
        for (const int K : type.shapes) check_shape(table, plain, type, K, counts);
        counts.report(type.name);
    }
}

}  // namespace selftest
