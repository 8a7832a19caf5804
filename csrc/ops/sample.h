// sample.h: one token for each row of logits; ops/sampling.py is the definition.
#pragma once

#include <cstddef>
#include <cstdint>

#include "context.h"

namespace pelton {

// SampleArrays of ops/sampling.py; arrays of [num_rows] unless it says otherwise there.
struct SampleParams {
    int vocab_size;
    const int32_t* targets;
    const float *temperature, *top_p, *min_p;
    const int32_t* top_k;
    const uint64_t* seed;
    const int32_t *choice, *position;
    const float *typical_p, *top_n_sigma, *xtc_probability, *xtc_threshold;
    const float *mirostat_tau, *mirostat_eta, *mirostat_mu;
    const uint8_t* chain;
    const float *repetition, *presence, *frequency;
    const int32_t *history_offsets, *history_ids, *history_counts;
    const int32_t *bias_offsets, *bias_ids;
    const float* bias_values;
    const int32_t* num_logprobs;
    const uint32_t* masks;  // nullptr: none
    const int32_t* mask_rows;
    const float* overrides;  // nullptr: none
    const int32_t* override_rows;
};

constexpr uint8_t kBadLogits = 1, kNoToken = 2;  // BAD_LOGITS and NO_TOKEN

// Sampled of ops/sampling.py, zeroed by the caller.
struct SampleResult {
    int32_t* ids;
    float* logprobs;
    int max_logprobs;
    int32_t* top_ids;  // [num_rows, max_logprobs]
    float* top_logprobs;
    int32_t* ranks;
    float* mu;
    uint8_t* errors;
};

// Bytes of a thread's scratch that sampling wants; the largest vocabulary that fits is over 340 000.
size_t sample_scratch(int vocab_size);

// Draws for rows [first, first + count) of the step's logit rows, row `first` being row 0 of `logits`.
void sample(const StepContext& step, int first, int count, const Rows& logits, const SampleParams& params,
            const SampleResult& result);

// A step of sequences that each have one token and draw the next one: `ids`, `positions` and the positions in their
// outputs, and what was drawn.
struct GoesOn {
    int num_rows;
    int32_t *ids, *positions, *output_positions;
    SampleResult result;

    // Makes it the next step: each sequence has the token that it drew, a position on.
    void advance() const;
    // No row has an error, or drew one of these.
    bool has_drawn_none_of(const int32_t* ends, int num_ends) const;
};

}  // namespace pelton
