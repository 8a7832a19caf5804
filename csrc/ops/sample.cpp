// Sampling, row by row. The chain and its numbers stand in ops/sampling.py; here it is done without sorting the
// vocabulary: a threshold below all that can matter leaves a few candidates, and selection among them is partial.
#include "ops/sample.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "kernels/race.h"
#include "ops/candidates.h"
#include "ops/draws.h"

namespace pelton {
namespace {

constexpr float kGreedyBelow = 1e-5f;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

int num_pieces(int vocab_size) { return (vocab_size + kSamplePiece - 1) / kSamplePiece; }
size_t size(int n) { return static_cast<size_t>(n); }

// One row of logits with the maxima of its pieces, and a thread's memory for places in it.
struct Row {
    const SampleKernels& kernels;
    const float* logits;
    int n;
    float* maxima;   // [num_pieces]
    float* spare;    // [num_pieces]
    uint64_t* sums;  // [num_pieces]
    int32_t* ids;    // [n], the upper half of `items`
    Candidate* items;

    // Returns whether the row holds no NaN.
    bool scan() const { return kernels.maxima(logits, n, maxima); }
    float most() const { return *std::max_element(maxima, maxima + num_pieces(n)); }

    int first_of(float value) const {
        int piece = 0;
        while (maxima[piece] != value) piece++;
        const float* begin = logits + piece * kSamplePiece;
        return static_cast<int>(std::find(begin, logits + n, value) - logits);
    }

    int collect(float threshold) const { return kernels.collect(logits, n, maxima, threshold, ids); }

    // At least k logits are as large as this: each of k pieces has one.
    float below_largest(int k) const {
        const int pieces = num_pieces(n);
        if (k > pieces) return -kInfinity;
        std::copy_n(maxima, pieces, spare);
        std::nth_element(spare, spare + k - 1, spare + pieces, std::greater<float>());
        return spare[k - 1];
    }

    // The order of tokens: descending logits, ascending ids.
    auto before() const {
        return [this](int32_t a, int32_t b) { return logits[a] > logits[b] || (logits[a] == logits[b] && a < b); };
    }
};

// Draws from a row at a temperature above 0. Weights are integers, so their sums have no order.
class Draw {
  public:
    Draw(const Row& row, float most, float temperature)
        : row_(row), most_(most), temperature_(temperature), inverse_(1.0f / temperature) {}

    // Row r's token; `mu` moves on where there is mirostat.
    int32_t operator()(const SampleParams& params, int r, float* mu) const {
        const int top_k = params.top_k[r];
        const float top_p = params.top_p[r], min_p = params.min_p[r];
        const bool is_filtered = has_filters(params, r);
        const bool has_top_k = top_k > 0 && top_k < row_.n, has_top_p = top_p < 1;
        const uint64_t bits = bits_of(params, r, 0);
        if (!has_top_k && !has_top_p && min_p <= 0 && !is_filtered) return from_all(bits);
        const int32_t least = std::max(1, static_cast<int32_t>(std::ceil(static_cast<double>(min_p) * kWeightOne)));
        int count = 0;
        if (has_top_k) count = keep_top_k(top_k);
        if (has_top_p) count = has_top_k ? keep_mass(count, share_of(top_p, mass(0, count, 0))) : keep_top_p(top_p);
        count = count > 0 ? in_order_of_ids(count) : row_.collect(floor_of(static_cast<float>(least) / kWeightOne));
        return is_filtered ? filtered(params, r, candidates(count, least), mu) : from_ids(count, least, bits);
    }

  private:
    static bool has_filters(const SampleParams& params, int r) {
        return params.typical_p[r] < 1 || params.top_n_sigma[r] > 0 || params.xtc_probability[r] > 0 ||
               params.mirostat_tau[r] > 0;
    }

    static uint64_t bits_of(const SampleParams& params, int r, uint32_t draw) {
        return philox(params.seed[r], params.position[r], params.choice[r], draw);
    }

    // ids[0, count) with weights of at least `least`, where the ids were.
    Candidates candidates(int count, int32_t least) const {
        Candidate* end = row_.items;
        for_weights(0, count, [&](int32_t id, int32_t weight) {
            *end = {id, weight};
            end += weight >= least;
        });
        return {row_.items, static_cast<int>(end - row_.items), row_.logits};
    }

    int32_t filtered(const SampleParams& params, int r, Candidates left, float* mu) const {
        if (params.typical_p[r] < 1) left.keep_typical(params.typical_p[r], most_, inverse_);
        if (params.top_n_sigma[r] > 0) {
            const double depth = static_cast<double>(params.top_n_sigma[r]) * deviation(row_.logits, row_.n, most_);
            left.keep_logits(static_cast<float>(static_cast<double>(most_) - depth));
        }
        const double coin = static_cast<double>(bits_of(params, r, 1) >> 11) * 0x1p-53;
        if (coin < static_cast<double>(params.xtc_probability[r])) left.exclude_top(params.xtc_threshold[r]);
        if (params.mirostat_tau[r] > 0) left.keep_expected(*mu);
        const Candidate drawn = left.draw(bits_of(params, r, 0));
        if (params.mirostat_tau[r] > 0) {
            const double surprise = -std::log2(static_cast<double>(drawn.weight) / static_cast<double>(left.mass()));
            const double excess = surprise - static_cast<double>(params.mirostat_tau[r]);
            *mu = static_cast<float>(static_cast<double>(*mu) - static_cast<double>(params.mirostat_eta[r]) * excess);
        }
        return drawn.id;
    }

    // A logit below every one whose weight is share * kWeightOne or more.
    float floor_of(float share) const {
        const double lowest = most_ + temperature_ * (std::log(static_cast<double>(share)) - 1e-3);
        return std::nextafter(static_cast<float>(lowest), -kInfinity);
    }

    uint64_t total_mass() const {
        row_.kernels.weigh_pieces(row_.logits, row_.n, row_.maxima, most_, inverse_, row_.sums);
        uint64_t total = 0;
        for (int piece = 0; piece < num_pieces(row_.n); piece++) total += row_.sums[piece];
        return total;
    }

    // use(id, weight) for ids[begin, end), whose weights are made one piece's worth at a time.
    template <class Use>
    void for_weights(int begin, int end, const Use& use) const {
        float logits[kSamplePiece];
        int32_t weights[kSamplePiece];
        for (; begin < end; begin += kSamplePiece) {
            const int count = std::min(kSamplePiece, end - begin);
            const int32_t* ids = row_.ids + begin;
            for (int i = 0; i < count; i++) logits[i] = row_.logits[ids[i]];
            row_.kernels.weigh(logits, count, most_, inverse_, weights);
            for (int i = 0; i < count; i++) use(ids[i], weights[i]);
        }
    }

    // What ids[begin, end) weigh together, those lighter than `least` left out.
    uint64_t mass(int begin, int end, int32_t least) const {
        uint64_t sum = 0;
        for_weights(begin, end,
                    [&](int32_t, int32_t weight) { sum += weight >= least ? static_cast<uint64_t>(weight) : 0; });
        return sum;
    }

    // These leave the kept tokens in ids[0, count), the last of them in the order of tokens at count - 1.
    int keep_top_k(int k) const {
        const int count = row_.collect(row_.below_largest(k));
        std::nth_element(row_.ids, row_.ids + k - 1, row_.ids + count, row_.before());
        return k;
    }

    int keep_top_p(float top_p) const {
        const uint64_t need = share_of(top_p, total_mass());
        int count = 0;
        // Small steps: each may multiply how many are collected, and what follows costs as many times more.
        for (const float depth : {8.0f, 10.0f, 12.0f, 14.0f, 16.0f, kInfinity}) {
            count = row_.collect(most_ - temperature_ * depth);
            if (mass(0, count, 0) >= need) break;
        }
        return keep_mass(count, need);
    }

    // The shortest run of ids[0, count), in the order of tokens, that weighs `need`.
    int keep_mass(int count, uint64_t need) const {
        int begin = 0, end = count;
        while (end - begin > 1) {
            const int middle = begin + (end - begin) / 2;
            std::nth_element(row_.ids + begin, row_.ids + middle, row_.ids + end, row_.before());
            const uint64_t first_half = mass(begin, middle, 0);
            if (first_half >= need) {
                end = middle;
            } else {
                need -= first_half;
                begin = middle;
            }
        }
        return end;
    }

    int in_order_of_ids(int count) const {
        const int32_t last = row_.ids[count - 1];
        const float threshold = row_.logits[last];
        const int found = row_.collect(threshold);
        const auto is_behind = [&](int32_t id) { return id > last && row_.logits[id] == threshold; };
        return static_cast<int>(std::remove_if(row_.ids, row_.ids + found, is_behind) - row_.ids);
    }

    int32_t from_ids(int count, int32_t least, uint64_t bits) const {
        Race race;
        for_weights(0, count, [&](int32_t id, int32_t weight) {
            if (weight >= least) race.enter(id, weight, bits);
        });
        return race.id;
    }

    int32_t from_all(uint64_t bits) const {
        const int32_t first = row_.first_of(most_);
        return row_.kernels.race(row_.logits, row_.n, row_.maxima, most_, inverse_, bits, first);
    }

    const Row& row_;
    const float most_, temperature_, inverse_;
};

bool is_edited(const SampleParams& params, int r) {
    const bool has_penalty = params.repetition[r] != 1 || params.presence[r] != 0 || params.frequency[r] != 0;
    return (has_penalty && params.history_offsets[r] < params.history_offsets[r + 1]) ||
           params.bias_offsets[r] < params.bias_offsets[r + 1] || (params.masks && params.mask_rows[r] >= 0);
}

void apply_mask(const uint32_t* words, int n, float* logits) {
    for (int begin = 0; begin < n; begin += 32) {
        const uint32_t allowed = words[begin / 32];
        if (allowed == ~uint32_t{0}) continue;
        const int count = std::min(32, n - begin);
        for (int i = 0; i < count; i++) logits[begin + i] = allowed >> i & 1 ? logits[begin + i] : -kInfinity;
    }
}

void edit(const SampleParams& params, int r, float* logits) {
    for (int i = params.history_offsets[r]; i < params.history_offsets[r + 1]; i++) {
        float& logit = logits[params.history_ids[i]];
        logit = logit > 0 ? logit / params.repetition[r] : logit * params.repetition[r];
        if (params.history_counts[i] > 0) logit -= params.presence[r];
        logit -= params.frequency[r] * static_cast<float>(params.history_counts[i]);
    }
    for (int i = params.bias_offsets[r]; i < params.bias_offsets[r + 1]; i++) {
        logits[params.bias_ids[i]] += params.bias_values[i];
    }
    if (!params.masks || params.mask_rows[r] < 0) return;
    const size_t num_words = size(params.vocab_size + 31) / 32;
    apply_mask(params.masks + size(params.mask_rows[r]) * num_words, params.vocab_size, logits);
}

void list_top(const Row& row, double log_sum, int count, int32_t* ids, float* logprobs) {
    count = std::min(count, row.n);
    if (count == 0) return;
    const int found = row.collect(row.below_largest(count));
    std::partial_sort(row.ids, row.ids + count, row.ids + found, row.before());
    for (int i = 0; i < count; i++) {
        ids[i] = row.ids[i];
        logprobs[i] = static_cast<float>(static_cast<double>(row.logits[row.ids[i]]) - log_sum);
    }
}

// A thread's scratch, cut up for one row.
struct RowMemory {
    float *copy, *raw_maxima, *maxima, *spare;
    uint64_t* sums;
    Candidate* items;
    int32_t* ids;

    RowMemory(uint8_t* scratch, int n) {
        const size_t row = size(num_pieces(n)) * kSamplePiece, pieces = size(num_pieces(n));
        sums = reinterpret_cast<uint64_t*>(scratch);
        copy = reinterpret_cast<float*>(sums + pieces);
        items = reinterpret_cast<Candidate*>(copy + row);
        ids = reinterpret_cast<int32_t*>(items) + row;
        raw_maxima = reinterpret_cast<float*>(items + row);
        maxima = raw_maxima + pieces;
        spare = maxima + pieces;
    }
};

// Draws row r's token. Returns an error, or 0.
uint8_t draw_row(const Row& raw, const SampleParams& params, int r, const RowMemory& memory, int32_t* drawn,
                 float* mu) {
    Row row = raw;
    bool has_nan = false;
    const float* given = params.overrides && params.override_rows[r] >= 0
                             ? params.overrides + size(params.override_rows[r]) * size(raw.n)
                             : raw.logits;
    if (is_edited(params, r)) {
        std::memcpy(memory.copy, given, size(raw.n) * sizeof(float));
        edit(params, r, memory.copy);
        given = memory.copy;
    }
    if (given != raw.logits) {
        row.logits = given;
        row.maxima = memory.maxima;
        has_nan = !row.scan();
    }
    const float most = row.most();
    if (has_nan || !std::isfinite(most)) return has_nan || most > 0 ? kBadLogits : kNoToken;
    if (params.temperature[r] < kGreedyBelow) {
        *drawn = row.first_of(most);
    } else {
        *drawn = Draw(row, most, params.temperature[r])(params, r, mu);
    }
    return 0;
}

bool continues(const SampleParams& params, int r) { return r > 0 && params.chain[r]; }

void sample_row(const SampleKernels& kernels, const float* logits, const SampleParams& params, int r, uint8_t* scratch,
                const SampleResult& result) {
    const int n = params.vocab_size;
    const RowMemory memory(scratch, n);
    const Row raw = {kernels, logits, n, memory.raw_maxima, memory.spare, memory.sums, memory.ids, memory.items};
    result.mu[r] = continues(params, r) ? result.mu[r - 1] : params.mirostat_mu[r];
    if (!raw.scan() || !std::isfinite(raw.most())) {
        result.errors[r] = kBadLogits;
        return;
    }
    if (params.targets[r] >= 0) {
        result.ids[r] = params.targets[r];
        result.ranks[r] = 1 + raw.collect(std::nextafter(logits[params.targets[r]], kInfinity));
    } else if ((result.errors[r] = draw_row(raw, params, r, memory, result.ids + r, result.mu + r)) != 0) {
        return;
    }
    if (params.num_logprobs[r] < 0) return;
    const double log_sum = raw.most() + std::log(kernels.exp_sum(logits, n, raw.most()));
    result.logprobs[r] = static_cast<float>(static_cast<double>(logits[result.ids[r]]) - log_sum);
    const size_t first = size(r) * size(result.max_logprobs);
    list_top(raw, log_sum, params.num_logprobs[r], result.top_ids + first, result.top_logprobs + first);
}

}  // namespace

size_t sample_scratch(int vocab_size) {
    const size_t pieces = size(num_pieces(vocab_size));
    return pieces * (kSamplePiece * (sizeof(float) + sizeof(Candidate)) + sizeof(uint64_t) + 3 * sizeof(float));
}

void sample(const StepContext& step, int first, int count, const Rows& logits, const SampleParams& params,
            const SampleResult& result) {
    step.pool.run(count, [&](int row, int thread) {
        if (row > 0 && continues(params, first + row)) return;  // it belongs to whoever has the row before it
        do {
            sample_row(*step.kernels.sample, logits.row(row), params, first + row, step.scratch_of(thread), result);
        } while (++row < count && continues(params, first + row));
    });
}

void GoesOn::advance() const {
    for (int row = 0; row < num_rows; row++) {
        ids[row] = result.ids[row];
        positions[row]++;
        output_positions[row]++;
    }
}

bool GoesOn::has_drawn_none_of(const int32_t* ends, int num_ends) const {
    for (int row = 0; row < num_rows; row++) {
        if (result.errors[row] || std::find(ends, ends + num_ends, result.ids[row]) != ends + num_ends) return false;
    }
    return true;
}

}  // namespace pelton
