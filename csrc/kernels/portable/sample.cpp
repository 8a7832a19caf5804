// The passes over logits that sample.h lists, one source for every instruction set.
#include "kernels/sample.h"

#include "kernels/portable/math.h"
#include "kernels/race.h"

namespace pelton::PELTON_ISA {
namespace {

constexpr float kNone = -__builtin_inff();
using VecL = uint64_t __attribute__((vector_size(kLanes * 4)));

// Calls use(vector, its place) over x; what is missing of the last vector is -inf.
template <class Use>
PELTON_INLINE void for_vectors(const float* x, int n, const Use& use) {
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) use(load(x + i), i);
    if (i == n) return;
    VecF last = splat(kNone);
    __builtin_memcpy(&last, x + i, static_cast<size_t>(n - i) * sizeof(float));
    use(last, i);
}

// Calls use(piece, its values, their number).
template <class Use>
PELTON_INLINE void for_pieces(const float* x, int n, const Use& use) {
    for (int begin = 0, piece = 0; begin < n; begin += kSamplePiece, piece++) {
        use(piece, x + begin, n - begin < kSamplePiece ? n - begin : kSamplePiece);
    }
}

bool maxima(const float* x, int n, float* out) {
    VecI nan = {};
    for_pieces(x, n, [&](int piece, const float* values, int count) {
        VecF most[kParts];
        for (VecF& part : most) part = splat(kNone);
        for_vectors(values, count, [&](VecF value, int i) {
            nan |= value != value;
            VecF& part = most[i / kLanes % kParts];
            part = max(value, part);
        });
        out[piece] = max_group(most);
    });
    int32_t any = 0;
    for (int i = 0; i < kLanes; i++) any |= nan[i];
    return any == 0;
}

double exp_sum(const float* x, int n, float most) {
    double sum = 0;
    for_pieces(x, n, [&](int, const float* values, int count) {
        VecF total[kParts] = {};
        for_vectors(values, count, [&](VecF value, int i) { total[i / kLanes % kParts] += exp(value - most); });
        sum += static_cast<double>(sum_group(total));
    });
    return sum;
}

PELTON_INLINE VecI weight_of(VecF x, float most, float inverse) {
    return __builtin_convertvector(exp((x - most) * inverse) * kWeightOne, VecI);
}

void weigh(const float* x, int n, float most, float inverse, int32_t* weights) {
    for_vectors(x, n, [&](VecF value, int i) {
        const VecI weight = weight_of(value, most, inverse);
        const int count = n - i < kLanes ? n - i : kLanes;
        __builtin_memcpy(weights + i, &weight, static_cast<size_t>(count) * sizeof(int32_t));
    });
}

constexpr float kWeightless = -22.0f;  // e^-22 < 2^-30

void weigh_pieces(const float* x, int n, const float* maxima, float most, float inverse, uint64_t* sums) {
    for_pieces(x, n, [&](int piece, const float* values, int count) {
        sums[piece] = 0;
        if ((maxima[piece] - most) * inverse < kWeightless) return;
        VecL total = {};
        for_vectors(values, count, [&](VecF value, int) {
            const VecL pairs = bits<VecL>(weight_of(value, most, inverse));
            total += (pairs & 0xffffffffu) + (pairs >> 32);
        });
        for (int i = 0; i < kLanes / 2; i++) sums[piece] += total[i];
    });
}

// Whether any of count tokens from id `begin` on may arrive before `first`: weight(i) are at least the weights of the
// vector at i. A weight of 1 waits for more than v >= noise / 2^32; v is taken with 24 bits, rounded down.
template <class Weight>
PELTON_INLINE bool may_win(int begin, int count, uint64_t bits_of_draw, double first, const Weight& weight) {
    const float latest = static_cast<float>(first) * 1.0001f;
    VecU ids;
    for (int i = 0; i < kLanes; i++) ids[i] = static_cast<uint32_t>(begin + i);
    VecI any = {};
    for (int i = 0; i < count; i += kLanes, ids += kLanes) {
        const VecI least = bits<VecI>(noise(ids, bits_of_draw) >> 8);
        any |= __builtin_convertvector(least, VecF) * 0x1p-24f <= weight(i) * latest;
    }
    int32_t is_any = 0;
    for (int i = 0; i < kLanes; i++) is_any |= any[i];
    return is_any != 0;
}

int32_t race(const float* x, int n, const float* maxima, float most, float inverse, uint64_t bits_of_draw,
             int32_t first) {
    Race race;
    race.enter(first, static_cast<int32_t>(kWeightOne), bits_of_draw);
    for_pieces(x, n, [&](int piece, const float* values, int count) {
        if ((maxima[piece] - most) * inverse < kWeightless) return;
        const int begin = piece * kSamplePiece;
        int32_t weights[kSamplePiece] = {};
        // Most pieces have no token that could win even with their largest weight. (One more: exp may round a smaller
        // logit up.)
        weigh(maxima + piece, 1, most, inverse, weights);
        const VecF largest = splat(static_cast<float>(weights[0]) + 1);
        if (!may_win(begin, count, bits_of_draw, race.first, [&](int) { return largest; })) return;
        weigh(values, count, most, inverse, weights);
        const auto weight = [&](int i) { return __builtin_convertvector(load<VecI>(weights + i), VecF); };
        if (!may_win(begin, count, bits_of_draw, race.first, weight)) return;
        for (int i = 0; i < count; i++) {
            if (weights[i] > 0) race.enter(begin + i, weights[i], bits_of_draw);
        }
    });
    return race.id;
}

int collect(const float* x, int n, const float* maxima, float threshold, int32_t* places) {
    int found = 0;
    for_pieces(x, n, [&](int piece, const float* values, int count) {
        if (maxima[piece] < threshold) return;
        for (int i = 0; i < count; i++) {
            places[found] = piece * kSamplePiece + i;
            found += values[i] >= threshold;
        }
    });
    return found;
}

}  // namespace

const SampleKernels sample_kernels = {maxima, exp_sum, weigh, weigh_pieces, race, collect};

}  // namespace pelton::PELTON_ISA
