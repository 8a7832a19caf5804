// panel.h: many rows. Some column tiles are unpacked over a stretch of K into L2, then all rows of a chunk meet them.
#pragma once

#include "kernels/amx/product.h"
#include "kernels/amx/streams.h"

namespace pelton::amx {

// An operand panel (128 KiB), a chunk's activations over the same stretch (1 MiB) and its sums (128 KiB) share L2.
constexpr int kPanelTiles = 4, kPanelSteps = 32, kChunkPasses = 16;

template <class Weights>
class Panel {
  public:
    Panel(const uint8_t* tiles, const Activations& x, int K, Output out, uint8_t* scratch)
        : weights_(tiles, K),
          x_(x),
          out_(out),
          panel_(reinterpret_cast<uint16_t*>(scratch)),
          sums_(reinterpret_cast<float*>(scratch + size_t{kPanelTiles} * kPanelSteps * kTileBytes)) {}

    void run(int tile0, int tile1) {
        const int passes = num_passes(x_);
        for (int p = 0; p < passes; p += kChunkPasses)
            for (int tile = tile0; tile < tile1; tile += kPanelTiles) {
                const Block block = {p, least(p + kChunkPasses, passes), tile, least(tile + kPanelTiles, tile1)};
                for (int step = 0; step < x_.steps; step += kPanelSteps)
                    multiply(block, step, least(kPanelSteps, x_.steps - step));
            }
    }

  private:
    struct Block {
        int pass0, pass1, tile0, tile1;
    };
    static int least(int a, int b) { return a < b ? a : b; }

    uint16_t* operand(int column_tile, int i) const {
        return panel_ + (static_cast<size_t>(column_tile) * kPanelSteps + static_cast<size_t>(i)) * kTileElements;
    }

    void unpack(const Block& block, int step0, int count) {
        for (int tile = block.tile0; tile < block.tile1; tile++)
            for (int i = 0; i < count; i++) weights_.unpack(tile, 0, step0 + i, operand(tile - block.tile0, i));
    }

    void multiply(const Block& block, int step0, int count) {
        unpack(block, step0, count);
        for (int p = block.pass0; p < block.pass1; p++) {
            const Pass pass = pass_of(x_, p);
            for (int tile = block.tile0; tile < block.tile1; tile += 2) {
                float* sums = sums_ + ((p - block.pass0) * kPanelTiles + tile - block.tile0) * 2 * kSumFloats;
                const bool is_pair = tile + 1 < block.tile1;
                if (pass.count == 2)
                    is_pair ? add<2, 2>(block, pass, tile, step0, count, sums)
                            : add<2, 1>(block, pass, tile, step0, count, sums);
                else
                    is_pair ? add<1, 2>(block, pass, tile, step0, count, sums)
                            : add<1, 1>(block, pass, tile, step0, count, sums);
            }
        }
    }

    template <int kRowTiles, int kColumnTiles>
    void add(const Block& block, Pass pass, int tile, int step0, int count, float* sums) {
        using Registers = Sums<kRowTiles, kColumnTiles>;
        if (step0 == 0)
            Registers::zero();
        else
            Registers::load(sums);
        const uint16_t* columns[kColumnTiles];
        for (int c = 0; c < kColumnTiles; c++) columns[c] = operand(tile - block.tile0 + c, 0);
        add_steps<kRowTiles, kColumnTiles>(x_, pass.first, step0, count, columns, [](int, int) {});
        Registers::store(sums);
        if (step0 + count < x_.steps) return;
        const uint8_t* weights[kColumnTiles];
        for (int c = 0; c < kColumnTiles; c++) weights[c] = weights_.tile(tile + c);
        write_sums<kColumnTiles>(x_, pass, sums, weights, tile, out_);
    }

    const WeightStreams<Weights, 1> weights_;
    const Activations x_;
    const Output out_;
    uint16_t* panel_;
    float* sums_;
};

}  // namespace pelton::amx
