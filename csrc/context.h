// context.h: what every op of a step can reach: the batch, the threads, the kernels, KV memory and scratch.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/table.h"
#include "threads.h"

namespace pelton {

class KVCache;  // kv.h: one cache group's blocks

// One step's flat inputs; the arrays are the caller's and live as long as the step. Sequence s owns rows
// seq_starts[s] .. seq_starts[s + 1] - 1, in position order. See Batch in ops/data.py.
struct BatchView {
    int num_tokens = 0;                      // T
    int num_sequences = 0;                   // S
    int num_logit_rows = 0;                  // R
    int num_drawn = 0;                       // of them, the first ones, which the head is for
    const int32_t* ids = nullptr;            // [T]
    const int32_t* positions = nullptr;      // [T]
    const int32_t* seq_starts = nullptr;     // [S + 1]
    const int32_t* logit_rows = nullptr;     // [R]
    const int32_t* const* tables = nullptr;  // per cache group: [S, table_widths[group]] block ids
    const int32_t* table_widths = nullptr;   // per cache group
};

struct StepContext {
    ThreadPool& pool;
    const KernelTable& kernels;
    const BatchView& batch;
    KVCache* const* caches;  // per cache group
    uint8_t* scratch;        // kScratchBytes for each thread, thread 0 first
    uint8_t* workspace;      // one shared buffer, as large as the hungriest op of the plan asked for; 64-byte aligned
    uint8_t* epilogue = nullptr;  // epilogue_bytes for each thread: the second product of a gated linear
    size_t epilogue_bytes = 0;

    uint8_t* scratch_of(int thread) const { return scratch + static_cast<size_t>(thread) * kScratchBytes; }
    float* epilogue_of(int thread) const {
        return reinterpret_cast<float*>(epilogue + static_cast<size_t>(thread) * epilogue_bytes);
    }
};

// A row-major float32 matrix in the arena: `stride` floats from one row to the next (a multiple of 16), rows
// 64-byte aligned. Columns from `width` to `stride` hold anything.
struct Rows {
    float* data = nullptr;
    int width = 0;
    int stride = 0;

    float* row(int r) const { return data + static_cast<size_t>(r) * static_cast<size_t>(stride); }
};

}  // namespace pelton
