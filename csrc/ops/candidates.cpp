#include "ops/candidates.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/race.h"
#include "ops/draws.h"

namespace pelton {
namespace {

uint64_t mass_of(const Candidate* items, int count) {
    uint64_t sum = 0;
    for (int i = 0; i < count; i++) sum += static_cast<uint64_t>(items[i].weight);
    return sum;
}

// The shortest run of items[0, count), in the given order, that weighs `need`: left in items[0, returned), the last of
// it at its end.
template <class Before>
int keep_run(Candidate* items, int count, uint64_t need, const Before& before) {
    int begin = 0, end = count;
    while (end - begin > 1) {
        const int middle = begin + (end - begin) / 2;
        std::nth_element(items + begin, items + middle, items + end, before);
        const uint64_t first_half = mass_of(items + begin, middle - begin);
        if (first_half >= need) {
            end = middle;
        } else {
            need -= first_half;
            begin = middle;
        }
    }
    return end;
}

}  // namespace

uint64_t Candidates::mass() const { return mass_of(items_, count_); }

template <class IsKept>
void Candidates::keep(const IsKept& is_kept) {
    const auto before = [this](const Candidate& a, const Candidate& b) { return is_before(a, b); };
    if (std::none_of(items_, items_ + count_, is_kept)) {
        items_[0] = *std::min_element(items_, items_ + count_, before);
        count_ = 1;
        return;
    }
    Candidate* end = items_;
    for (int i = 0; i < count_; i++) {
        if (is_kept(items_[i])) *end++ = items_[i];
    }
    count_ = static_cast<int>(end - items_);
}

void Candidates::keep_typical(float share, float most, float inverse) {
    // A token's surprise is its distance below the likeliest, but for a constant that is the same for all.
    const auto distance = [&](const Candidate& item) { return (most - logits_[item.id]) * inverse; };
    double sum = 0;
    for (int i = 0; i < count_; i++)
        sum += static_cast<double>(items_[i].weight) * static_cast<double>(distance(items_[i]));
    const uint64_t total = mass();
    const float expected = static_cast<float>(sum / static_cast<double>(total));
    const auto oddity = [&](const Candidate& item) { return std::fabs(distance(item) - expected); };
    // The bits of positive floats are in their order: the upper ones make buckets, of which the one with the end of the
    // run is looked at closely.
    constexpr int kBucketBits = 13;
    const auto bucket = [&](const Candidate& item) {
        return std::bit_cast<uint32_t>(oddity(item)) >> (31 - kBucketBits);
    };
    uint64_t masses[1 << kBucketBits] = {};
    for (int i = 0; i < count_; i++) masses[bucket(items_[i])] += static_cast<uint64_t>(items_[i].weight);
    uint64_t need = share_of(share, total);
    uint32_t last = 0;
    while (masses[last] < need) need -= masses[last++];
    std::vector<Candidate> close;
    for (int i = 0; i < count_; i++) {
        if (bucket(items_[i]) == last) close.push_back(items_[i]);
    }
    const auto before = [&](const Candidate& a, const Candidate& b) {
        const float left = oddity(a), right = oddity(b);
        return left < right || (left == right && is_before(a, b));
    };
    const Candidate end =
        close[static_cast<size_t>(keep_run(close.data(), static_cast<int>(close.size()), need, before) - 1)];
    keep([&](const Candidate& item) { return !before(end, item); });
}

void Candidates::keep_logits(float least) {
    keep([&](const Candidate& item) { return logits_[item.id] >= least; });
}

void Candidates::exclude_top(float share) {
    const uint64_t least = share_of(share, mass());
    const auto is_top = [&](const Candidate& item) { return static_cast<uint64_t>(item.weight) >= least; };
    const Candidate* last = nullptr;
    for (int i = 0; i < count_; i++) {
        if (is_top(items_[i]) && (!last || is_before(*last, items_[i]))) last = items_ + i;
    }
    if (!last) return;
    const int32_t kept = last->id;
    keep([&](const Candidate& item) { return item.id == kept || !is_top(item); });
}

void Candidates::keep_expected(float surprise) {
    const double least = static_cast<double>(mass()) * std::exp2(-static_cast<double>(surprise));
    keep([&](const Candidate& item) { return static_cast<double>(item.weight) >= least; });
}

Candidate Candidates::draw(uint64_t bits) const {
    Race race;
    for (int i = 0; i < count_; i++) race.enter(items_[i].id, items_[i].weight, bits);
    return *std::find_if(items_, items_ + count_, [&](const Candidate& item) { return item.id == race.id; });
}

double deviation(const float* logits, int n, float most) {
    double sum = 0, squares = 0;
    int count = 0;
    for (int i = 0; i < n; i++) {
        if (logits[i] == -std::numeric_limits<float>::infinity()) continue;
        const double distance = static_cast<double>(logits[i]) - static_cast<double>(most);
        sum += distance;
        squares += distance * distance;
        count++;
    }
    const double mean = sum / count;
    return std::sqrt(std::max(0.0, squares / count - mean * mean));
}

}  // namespace pelton
