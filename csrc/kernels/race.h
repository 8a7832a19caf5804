// race.h: a token drawn as the winner of a race. Each token waits for a time of an exponential distribution, keyed
// noise divided by its weight; the first to arrive is drawn, which is each by its share of the weight, whatever takes
// part. ops/sampling.py is the definition.
#pragma once

#include <cstdint>
#include <limits>

namespace pelton {

// All is inlined: no code may be shared between units of different instruction sets.
#define PELTON_RACE static inline __attribute__((always_inline))

// A bijection of 32-bit words in which each bit of the input turns half of those of the output (lowbias32 of Chris
// Wellons, "Prospecting for hash functions", 2018). Also for vectors of words.
template <class Word>
PELTON_RACE Word scatter(Word x) {
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return x ^ x >> 16;
}

// A token's noise in a draw that has these bits.
template <class Word>
PELTON_RACE Word noise(Word id, uint64_t bits) {
    return scatter(scatter(id ^ static_cast<uint32_t>(bits)) ^ static_cast<uint32_t>(bits >> 32));
}

PELTON_RACE double place(uint32_t noise) { return (static_cast<double>(noise) + 0.5) * 0x1p-32; }

// -ln(1 - v), v = place(noise): the time that a weight of 1 waits. With 1 - v = 2^e m, m within sqrt(2) of 1, ln m =
// 2 atanh(s), s = (m - 1) / (m + 1), to s^17: to 1e-14 of its value. No fused operations: the same bits anywhere.
PELTON_RACE double waiting(double v) {
    constexpr double kSqrt2 = 1.4142135623730951, kLn2 = 0.6931471805599453;
    double m = 1.0 - v;
    uint64_t word;
    __builtin_memcpy(&word, &m, sizeof word);
    int e = static_cast<int>(word >> 52) - 1023;
    word = (word & 0xfffffffffffffu) | uint64_t{1023} << 52;
    __builtin_memcpy(&m, &word, sizeof m);
    if (m > kSqrt2) {
        m *= 0.5;
        e++;
    }
    const double s = (m - 1.0) / (m + 1.0), square = s * s;
    double series = 2.0 / 17.0;
    for (int k = 15; k > 0; k -= 2) series = series * square + 2.0 / k;
    return -(static_cast<double>(e) * kLn2 + s * series);
}

struct Race {
    double first = std::numeric_limits<double>::infinity();
    int32_t id = -1;

    // A token with a weight of at least 1. Ties go to the lowest id, whatever the order in which tokens enter.
    __attribute__((always_inline)) inline void enter(int32_t token, int32_t weight, uint64_t bits) {
        const double v = place(noise(static_cast<uint32_t>(token), bits)), rate = static_cast<double>(weight);
        if (v * 0.999999 > first * rate) return;  // it waits for v / rate at least
        const double time = waiting(v) / rate;
        if (time > first || (time == first && token > id)) return;
        first = time;
        id = token;
    }
};

#undef PELTON_RACE

}  // namespace pelton
