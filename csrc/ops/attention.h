// attention.h: causal attention over paged KV memory, split over the pool's threads.
#pragma once

#include <cstddef>

#include "context.h"
#include "kv.h"

namespace pelton {

// See AttendSpec in ops/spec.py. window 0: none; softcap 0: none.
struct AttendArgs {
    Rows q, k, v;  // [T, num_heads * head_dim], [T, num_kv_heads * head_dim], [T, num_kv_heads * value_dim]
    Rows out;      // [T, num_heads * value_dim]
    int group;     // cache group
    int slot;      // the layer's place in the group
    int num_heads;
    float scale;
    int window;
    float softcap;
};

// Bytes of a thread's scratch that `attend` wants at most.
size_t attend_scratch(const KVShape& shape, int num_heads);

// Bytes of workspace that `attend` wants at most, for contexts of up to max_context tokens.
size_t attend_workspace(const KVShape& shape, int num_heads, int max_context, int num_threads);

// Stores k and v, rounded to the cache type, then attends over all keys as stored. The result has the same bits
// whatever else is in the batch, however a prompt was cut into steps, and for every number of threads.
void attend(const StepContext& step, const AttendArgs& args);

}  // namespace pelton
