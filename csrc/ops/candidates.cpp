#include "ops/candidates.h"

#include <algorithm>
#include <cmath>
#include <limits>

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

const Candidate& Candidates::first() const {
    return *std::min_element(items_, items_ + count_, [this](const auto& a, const auto& b) { return is_before(a, b); });
}

template <class IsKept>
void Candidates::keep(const IsKept& is_kept) {
    const Candidate spare = first();
    count_ = static_cast<int>(std::partition(items_, items_ + count_, is_kept) - items_);
    if (count_ == 0) items_[count_++] = spare;
}

void Candidates::keep_typical(float share, float most, float inverse) {
    // A token's surprise is its distance below the likeliest, but for a constant that is the same for all.
    const auto distance = [&](const Candidate& item) { return (most - logits_[item.id]) * inverse; };
    double sum = 0;
    for (int i = 0; i < count_; i++)
        sum += static_cast<double>(items_[i].weight) * static_cast<double>(distance(items_[i]));
    const uint64_t total = mass();
    const float expected = static_cast<float>(sum / static_cast<double>(total));
    count_ = keep_run(items_, count_, share_of(share, total), [&](const Candidate& a, const Candidate& b) {
        const float left = std::fabs(distance(a) - expected), right = std::fabs(distance(b) - expected);
        return left < right || (left == right && is_before(a, b));
    });
}

void Candidates::keep_logits(float least) {
    keep([&](const Candidate& item) { return logits_[item.id] >= least; });
}

void Candidates::exclude_top(float share) {
    const uint64_t least = share_of(share, mass());
    const auto is_top = [&](const Candidate& item) { return static_cast<uint64_t>(item.weight) >= least; };
    Candidate* end = std::partition(items_, items_ + count_, is_top);
    if (end - items_ < 2) return;
    const auto last = std::max_element(items_, end, [this](const auto& a, const auto& b) { return is_before(a, b); });
    std::swap(*last, *(end - 1));
    count_ = static_cast<int>(std::move(end - 1, items_ + count_, items_) - items_);
}

void Candidates::keep_expected(float surprise) {
    const double least = static_cast<double>(mass()) * std::exp2(-static_cast<double>(surprise));
    keep([&](const Candidate& item) { return static_cast<double>(item.weight) >= least; });
}

Candidate Candidates::draw(uint64_t bits) {
    const auto by_id = [](const Candidate& a, const Candidate& b) { return a.id < b.id; };
    return items_[keep_run(items_, count_, target(bits, mass()) + 1, by_id) - 1];
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
