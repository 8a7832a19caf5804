// The tile unit at its fastest: products whose operands are in tile registers already.
#include "kernels/amx/linear.h"
#include "kernels/amx/tiles.h"

namespace pelton::amx {

float bf16_products(int num_steps) {
    alignas(64) uint16_t ones[kTileElements];
    for (uint16_t& one : ones) one = 0x3f80;
    alignas(64) float sums[4 * kRows * kRows];
    const TileRegisters registers(kRows, kRows);
    Sums<2, 2>::zero();
    load_tile<row_register(0)>(ones);
    load_tile<row_register(1)>(ones);
    load_tile<column_register(0)>(ones);
    load_tile<column_register(1)>(ones);
    for (int done = 0; done < num_steps; done += 4) {
        multiply_tiles<sum_register(0, 0), row_register(0), column_register(0)>();
        multiply_tiles<sum_register(1, 0), row_register(1), column_register(0)>();
        multiply_tiles<sum_register(0, 1), row_register(0), column_register(1)>();
        multiply_tiles<sum_register(1, 1), row_register(1), column_register(1)>();
    }
    Sums<2, 2>::store(sums);
    float total = 0;
    for (int tile = 0; tile < 4; tile++) total += sums[tile * kRows * kRows];
    return total;
}

}  // namespace pelton::amx
