// sample.h: passes over one row of logits: one table per instruction set.
//
// A row is cut into pieces of 256; the maximum of each piece lets later passes leave out pieces that cannot matter.
#pragma once

#include <cstdint>

namespace pelton {

constexpr int kSamplePiece = 256;
constexpr float kWeightOne = 1073741824.0f;  // 2^30, the weight of the likeliest token

struct SampleKernels {
    // The maximum of each piece. Returns whether x holds no NaN.
    bool (*maxima)(const float* x, int n, float* maxima);
    // The sum of e^(x - most).
    double (*exp_sum)(const float* x, int n, float most);
    // weights = floor(kWeightOne * e^((x - most) * inverse)), and their sum over each piece.
    void (*weigh)(const float* x, int n, float most, float inverse, int32_t* weights);
    void (*weigh_pieces)(const float* x, int n, const float* maxima, float most, float inverse, uint64_t* sums);
    // The winner of the race (race.h) of all tokens with these weights, `first` of the largest logit being in it
    // already.
    int32_t (*race)(const float* x, int n, const float* maxima, float most, float inverse, uint64_t bits,
                    int32_t first);
    // The places of values >= threshold, ascending; returns their number.
    int (*collect)(const float* x, int n, const float* maxima, float threshold, int32_t* places);
};

}  // namespace pelton

#ifdef PELTON_ISA  // the table that this unit's instruction set has: kernels/portable/sample.cpp
namespace pelton::PELTON_ISA {
extern const SampleKernels sample_kernels;
}
#endif
