// candidates.h: the tokens that a row may still draw, with their weights, and the filters that look at these. Nothing
// is sorted: what a filter needs of an order it finds by selection. ops/sampling.py is the definition.
#pragma once

#include <cstdint>

namespace pelton {

struct Candidate {
    int32_t id, weight;
};

// Never empty: a filter that would leave nothing leaves the first of what there is.
class Candidates {
  public:
    // `count` items by ascending id, in which order they stay, each with a weight of at least 1. `logits`: of the whole
    // row.
    Candidates(Candidate* items, int count, const float* logits) : items_(items), count_(count), logits_(logits) {}

    // typical_p: those nearest to the expected surprise. `most` and `inverse`: of the temperature.
    void keep_typical(float share, float most, float inverse);
    // top_n_sigma: those with a logit of at least this.
    void keep_logits(float least);
    // XTC: of those with at least this share of the weight, all but the last go.
    void exclude_top(float share);
    // Mirostat: those with a surprise of at most this, in bits.
    void keep_expected(float surprise);

    Candidate draw(uint64_t bits) const;
    uint64_t mass() const;

  private:
    bool is_before(const Candidate& a, const Candidate& b) const {
        return logits_[a.id] > logits_[b.id] || (logits_[a.id] == logits_[b.id] && a.id < b.id);
    }
    template <class IsKept>
    void keep(const IsKept& is_kept);

    Candidate* items_;
    int count_;
    const float* logits_;
};

// The standard deviation of a row's finite logits, `most` being the largest.
double deviation(const float* logits, int n, float most);

}  // namespace pelton
