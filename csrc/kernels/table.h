// table.h: function pointers, one table per instruction set: all that ops know of a CPU.
//
// A table is filled by csrc/kernels/<isa>/table.cpp and picked once by dispatch.cpp. Everything here is plain C
// data, so that units compiled for different instruction sets can share this header safely.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/attention.h"
#include "kernels/limits.h"
#include "kernels/rows.h"
#include "kernels/sample.h"
#include "types.h"

namespace pelton {

// How activations are prepared for a linear kernel; one prepared form serves every weight of the same family,
// so q/k/v and gate/up share it.
enum class Family : int {
    Float32 = 0,  // rows of float32, zero-padded to the kernel's K
    Int8 = 1,     // int8 with one float32 scale and one integer sum per 32 columns
    BFloat16 = 2  // bf16 in AMX tile order
};
constexpr int kNumFamilies = 3;

// Rows of a weight are packed sixteen at a time into a tile: contiguous, the tile's whole K after each other.
constexpr int kTileRows = 16;

struct ActivationKernel {
    // Bytes of M prepared rows of K columns. 64-byte aligned memory is passed to the others.
    size_t (*bytes)(int M, int K);
    // Prepares rows [m0, m1) of M (m0 is a multiple of 16): x is row-major float32 with stride ldx.
    // Any split of the rows over threads gives the same bytes. Padding that `run` reads is written here.
    void (*prepare)(const float* x, size_t ldx, int m0, int m1, int M, int K, uint8_t* act);
};

struct LinearKernel {
    Family family;
    // Packed bytes of one tile (16 rows x K columns), a multiple of 64. K is any multiple of the type's block.
    size_t (*tile_bytes)(int K);
    // Packs num_rows (1..16) rows of file bytes, rows[i] being row i; the rest of the tile is zero weights.
    void (*pack)(const uint8_t* const* rows, int num_rows, int K, uint8_t* tile);
    // Row r (0..15) of a tile back to float32, in this family's numerics: what `embed` returns.
    void (*unpack_row)(const uint8_t* tile, int r, int K, float* out);
    // out[m * ldo + n] = sum_k x[m][k] w[n][k] for m in [0, M), n in [16 * t0, 16 * t1). Whole tiles are written:
    // `out` rows have room for ceil(N/16)*16 columns. `tiles` points at tile 0. The value of out[m][n] does not
    // depend on M, t0, t1, the thread, or any other row. `scratch` is this thread's, scratch_bytes long.
    void (*run)(const uint8_t* tiles, const uint8_t* act, int M, int K, float* out, size_t ldo, int t0, int t1,
                uint8_t* scratch);
};

constexpr size_t kScratchBytes = size_t{4} << 20;  // per thread, 64-byte aligned, huge-page backed where possible

struct LinearTable {
    ActivationKernel activations[kNumFamilies];      // null functions: family not used on this instruction set
    const LinearKernel* (*linear)(WeightType type);  // nullptr: type not supported
};

struct KernelTable {
    const char* isa;
    LinearTable linear;
    const AttentionKernel* attention;  // [kNumKVTypes]
    const RowKernels* rows;
    const SampleKernels* sample;
    const LimitKernels* limits;
    // Like those: num_steps (a multiple of 4) times 16 weight rows x 16 activation rows x 32 columns of ones in tile
    // registers, 2 x 16 x 16 x 32 operations each. Returns 32 times num_steps. Null where there are no tiles.
    float (*bf16_products)(int num_steps) = nullptr;
};

// One function per instruction set that this build has, defined in csrc/kernels/<isa>/table.cpp.
namespace generic {
const KernelTable* kernel_table();
}
namespace avx2 {
const KernelTable* kernel_table();
}
namespace avx512 {
const KernelTable* kernel_table();
}
namespace amx {
const KernelTable* kernel_table();
}

// dispatch.cpp: the instruction sets that this build and this CPU have, best last; and the table of one of them
// (empty name: the best). Returns nullptr for a name that is not among them.
constexpr int kMaxIsas = 8;
int available_isas(const char* names[kMaxIsas]);
const KernelTable* find_kernels(const char* isa);

}  // namespace pelton
