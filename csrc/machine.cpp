#include "machine.h"

#include <algorithm>
#include <stdexcept>

namespace pelton {

static const KernelTable& kernels_of(const std::string& isa) {
    const KernelTable* table = find_kernels(isa.c_str());
    if (!table) throw std::invalid_argument("this build or this CPU has no instruction set named " + isa);
    return *table;
}

Machine::Machine(const std::string& isa, int num_threads) : kernels(kernels_of(isa)), pool(num_threads) {}

void Machine::pack(const LinearKernel& kernel, const uint8_t* file, size_t row_bytes, int num_rows, int K,
                   const int32_t* row_order, uint8_t* tiles) {
    const size_t tile_bytes = kernel.tile_bytes(K);
    pool.run((num_rows + kTileRows - 1) / kTileRows, [&](int tile, int) {
        const uint8_t* rows[kTileRows];
        const int first = tile * kTileRows, count = std::min(kTileRows, num_rows - first);
        for (int i = 0; i < count; i++) {
            const int row = row_order ? row_order[first + i] : first + i;
            rows[i] = file + static_cast<size_t>(row) * row_bytes;
        }
        kernel.pack(rows, count, K, tiles + static_cast<size_t>(tile) * tile_bytes);
    });
}

}  // namespace pelton
