// machine.h: what a loaded model runs on: the kernels of one instruction set, threads, and their scratch.
#pragma once

#include <string>

#include "kernels/table.h"
#include "memory.h"
#include "threads.h"

namespace pelton {

// What linear's epilogue needs beside the kernel's own scratch: one tile of results for every row of a step.
constexpr size_t epilogue_bytes(int max_tokens) {
    const size_t least = size_t{512} << 10, tile = static_cast<size_t>(max_tokens) * kTileRows * sizeof(float);
    return tile < least ? least : tile;
}

class Machine {
  public:
    // Throws std::invalid_argument for an instruction set that this build or this CPU lacks ("": the best).
    Machine(const std::string& isa, int num_threads);

    const KernelTable& kernels;
    ThreadPool pool;

    // nullptr: the instruction set has no kernel for the type.
    const LinearKernel* linear(WeightType type) const { return kernels.linear.linear(type); }

    size_t scratch_bytes(int max_tokens) const {
        return static_cast<size_t>(pool.size()) * (kScratchBytes + epilogue_bytes(max_tokens));
    }

    // Packs num_rows rows of file bytes into tiles, with all threads. Row i is file row row_order[i], or i.
    void pack(const LinearKernel& kernel, const uint8_t* file, size_t row_bytes, int num_rows, int K,
              const int32_t* row_order, uint8_t* tiles);
};

}  // namespace pelton
