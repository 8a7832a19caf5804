// ring.h: few rows. Weights are unpacked one unit ahead into one of two small slots in L1, while the tile unit
// multiplies the unit before: what decoding runs, as fast as memory delivers the weights.
#pragma once

#include "kernels/amx/product.h"
#include "kernels/amx/streams.h"

namespace pelton::amx {

// Walks the column tiles [tile0, tile1), kColumnTiles at a time. With more than one pass the sums of a unit wait in
// memory while the other passes meet it; units are longer then.
template <class Weights, int kColumnTiles>
class Ring {
  public:
    Ring(const uint8_t* tiles, const Activations& x, int K, Output out, uint8_t* scratch)
        : weights_(tiles, K),
          x_(x),
          out_(out),
          slots_(reinterpret_cast<uint16_t*>(scratch)),
          sums_(reinterpret_cast<float*>(scratch + 2 * kSlotBytes)),
          unit_steps_(num_passes(x) == 1 ? kShortUnit : kLongUnit) {}

    void run(int tile0, int tile1) {
        const Unit end = {tile1, 0, 0};
        Unit unit = unit_at(tile0, 0);
        for (int i = 0; i < unit.count; i++)
            for (int c = 0; c < kColumnTiles; c++) unpack(unit, 0, c, i);
        for (int slot = 0; unit.tile < tile1; slot ^= 1) {
            const Unit next = after(unit);
            multiply(unit, slot, next.tile < tile1 ? next : end);
            unit = next;
        }
    }

  private:
    static constexpr int kShortUnit = 2, kLongUnit = 4;
    // Half a page off a multiple of 4 KiB, so that the two slots do not fall on the same addresses modulo a page.
    static constexpr size_t kSlotBytes = kColumnTiles * kLongUnit * kTileBytes + 2048;

    struct Unit {
        int tile, step, count;
    };
    Unit unit_at(int tile, int step) const {
        const int left = x_.steps - step;
        return {tile, step, left < unit_steps_ ? left : unit_steps_};
    }
    Unit after(Unit unit) const {
        const int step = unit.step + unit.count;
        return step < x_.steps ? unit_at(unit.tile, step) : unit_at(unit.tile + kColumnTiles, 0);
    }
    uint16_t* operand(int slot, int c, int i) const {
        return slots_ + static_cast<size_t>(slot) * (kSlotBytes / 2) + (c * kLongUnit + i) * kTileElements;
    }

    void unpack(Unit unit, int slot, int c, int i) const {
        weights_.fetch_far(unit.tile, c, unit.step + i);
        weights_.unpack(unit.tile, c, unit.step + i, operand(slot, c, i));
    }

    void multiply(Unit unit, int slot, Unit next) {
        const int passes = num_passes(x_);
        for (int p = 0; p < passes; p++) {
            const Pass pass = pass_of(x_, p);
            // The next unit is unpacked beside the first pass.
            const Unit ahead = p == 0 ? next : Unit{0, 0, 0};
            if (pass.count == 2)
                multiply_pass<2>(unit, slot, ahead, pass, sums_ + p * 4 * kSumFloats, passes > 1);
            else
                multiply_pass<1>(unit, slot, ahead, pass, sums_ + p * 4 * kSumFloats, passes > 1);
        }
    }

    template <int kRowTiles>
    void multiply_pass(Unit unit, int slot, Unit ahead, Pass pass, float* sums, bool sums_wait) {
        using Registers = Sums<kRowTiles, kColumnTiles>;
        if (unit.step == 0)
            Registers::zero();
        else if (sums_wait)
            Registers::load(sums);
        const uint16_t* columns[kColumnTiles];
        for (int c = 0; c < kColumnTiles; c++) columns[c] = operand(slot, c, 0);
        add_steps<kRowTiles, kColumnTiles>(x_, pass.first, unit.step, unit.count, columns, [&](int c, int i) {
            if (i < ahead.count) unpack(ahead, slot ^ 1, c, i);
        });
        for (int i = unit.count; i < ahead.count; i++)
            for (int c = 0; c < kColumnTiles; c++) unpack(ahead, slot ^ 1, c, i);
        const bool is_last = unit.step + unit.count == x_.steps;
        if (is_last || sums_wait) Registers::store(sums);
        if (!is_last) return;
        const uint8_t* weights[kColumnTiles];
        for (int c = 0; c < kColumnTiles; c++) weights[c] = weights_.tile(unit.tile + c);
        write_sums<kColumnTiles>(x_, pass, sums, weights, unit.tile, out_);
    }

    WeightStreams<Weights, kColumnTiles> weights_;
    const Activations x_;
    const Output out_;
    uint16_t* slots_;
    float* sums_;
    const int unit_steps_;
};

}  // namespace pelton::amx
