// Sampling, row by row. The chain and its numbers stand in ops/sampling.py; here it is done without sorting the
// vocabulary: a threshold below all that can matter leaves a few candidates, and selection among them is partial.
#include "ops/sample.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

namespace pelton {
namespace {

constexpr float kGreedyBelow = 1e-5f;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

int num_pieces(int vocab_size) { return (vocab_size + kSamplePiece - 1) / kSamplePiece; }
size_t size(int n) { return static_cast<size_t>(n); }

// Philox4x32-10: 64 random bits by key.
uint64_t philox(uint64_t seed, int32_t position, int32_t choice, uint32_t draw) {
    uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
    uint32_t counter[4] = {static_cast<uint32_t>(position), static_cast<uint32_t>(choice), draw, 0};
    for (int round = 0; round < 10; round++) {
        const uint64_t left = uint64_t{0xD2511F53} * counter[0], right = uint64_t{0xCD9E8D57} * counter[2];
        counter[0] = static_cast<uint32_t>(right >> 32) ^ counter[1] ^ key[0];
        counter[2] = static_cast<uint32_t>(left >> 32) ^ counter[3] ^ key[1];
        counter[1] = static_cast<uint32_t>(right);
        counter[3] = static_cast<uint32_t>(left);
        key[0] += 0x9E3779B9;
        key[1] += 0xBB67AE85;
    }
    return uint64_t{counter[1]} << 32 | counter[0];
}

// One row of logits with the maxima of its pieces, and a thread's memory for places in it.
struct Row {
    const SampleKernels& kernels;
    const float* logits;
    int n;
    float* maxima;   // [num_pieces]
    float* spare;    // [num_pieces]
    uint64_t* sums;  // [num_pieces]
    int32_t* ids;    // [n]

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

    int32_t operator()(int top_k, float top_p, float min_p, uint64_t bits) const {
        const bool has_top_k = top_k > 0 && top_k < row_.n, has_top_p = top_p < 1;
        if (!has_top_k && !has_top_p && min_p <= 0) return from_all(bits);
        const int32_t least = static_cast<int32_t>(std::ceil(static_cast<double>(min_p) * kWeightOne));
        int count = 0;
        if (has_top_k) count = keep_top_k(top_k);
        if (has_top_p) count = has_top_k ? keep_mass(count, needed(top_p, mass(0, count, 0))) : keep_top_p(top_p);
        count = count > 0 ? in_order_of_ids(count) : row_.collect(floor_of(min_p));
        return from_ids(count, least, bits);
    }

  private:
    static uint64_t needed(float top_p, uint64_t total) {
        return static_cast<uint64_t>(std::max(1.0, std::ceil(static_cast<double>(top_p) * static_cast<double>(total))));
    }

    static uint64_t target(uint64_t bits, uint64_t total) {
        return static_cast<uint64_t>(static_cast<unsigned __int128>(bits) * total >> 64);
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

    // The weights of ids[begin, end), one piece's worth at a time: use(id, weight) until it returns true.
    template <class Use>
    void for_weights(int begin, int end, const Use& use) const {
        float logits[kSamplePiece];
        int32_t weights[kSamplePiece];
        for (; begin < end; begin += kSamplePiece) {
            const int count = std::min(kSamplePiece, end - begin);
            const int32_t* ids = row_.ids + begin;
            for (int i = 0; i < count; i++) logits[i] = row_.logits[ids[i]];
            row_.kernels.weigh(logits, count, most_, inverse_, weights);
            for (int i = 0; i < count; i++) {
                if (use(ids[i], weights[i])) return;
            }
        }
    }

    // What ids[begin, end) weigh together, those lighter than `least` left out.
    uint64_t mass(int begin, int end, int32_t least) const {
        uint64_t sum = 0;
        for_weights(begin, end, [&](int32_t, int32_t weight) {
            sum += weight >= least ? static_cast<uint64_t>(weight) : 0;
            return false;
        });
        return sum;
    }

    // These leave the kept tokens in ids[0, count), the last of them in the order of tokens at count - 1.
    int keep_top_k(int k) const {
        const int count = row_.collect(row_.below_largest(k));
        std::nth_element(row_.ids, row_.ids + k - 1, row_.ids + count, row_.before());
        return k;
    }

    int keep_top_p(float top_p) const {
        const uint64_t need = needed(top_p, total_mass());
        int count = 0;
        for (const float depth : {8.0f, 16.0f, kInfinity}) {
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
        uint64_t left = target(bits, mass(0, count, least));
        int32_t drawn = 0;
        for_weights(0, count, [&](int32_t id, int32_t weight) {
            if (weight < least) return false;
            drawn = id;
            if (static_cast<uint64_t>(weight) > left) return true;
            left -= static_cast<uint64_t>(weight);
            return false;
        });
        return drawn;
    }

    int32_t from_all(uint64_t bits) const {
        uint64_t left = target(bits, total_mass());
        int piece = 0;
        while (row_.sums[piece] <= left) left -= row_.sums[piece++];
        const int begin = piece * kSamplePiece;
        int32_t weights[kSamplePiece];
        row_.kernels.weigh(row_.logits + begin, std::min(kSamplePiece, row_.n - begin), most_, inverse_, weights);
        int i = 0;
        while (static_cast<uint64_t>(weights[i]) <= left) left -= static_cast<uint64_t>(weights[i++]);
        return begin + i;
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
    int32_t* ids;

    RowMemory(uint8_t* scratch, int n) {
        const size_t row = size(num_pieces(n)) * kSamplePiece, pieces = size(num_pieces(n));
        sums = reinterpret_cast<uint64_t*>(scratch);
        copy = reinterpret_cast<float*>(sums + pieces);
        ids = reinterpret_cast<int32_t*>(copy + row);
        raw_maxima = reinterpret_cast<float*>(ids + row);
        maxima = raw_maxima + pieces;
        spare = maxima + pieces;
    }
};

// Draws row r's token. Returns an error, or 0.
uint8_t draw_row(const Row& raw, const SampleParams& params, int r, const RowMemory& memory, int32_t* drawn) {
    Row row = raw;
    bool has_nan = false;
    if (is_edited(params, r)) {
        std::memcpy(memory.copy, raw.logits, size(raw.n) * sizeof(float));
        edit(params, r, memory.copy);
        row.logits = memory.copy;
        row.maxima = memory.maxima;
        has_nan = !row.scan();
    }
    const float most = row.most();
    if (has_nan || !std::isfinite(most)) return has_nan || most > 0 ? kBadLogits : kNoToken;
    if (params.temperature[r] < kGreedyBelow) {
        *drawn = row.first_of(most);
    } else {
        const uint64_t bits = philox(params.seed[r], params.position[r], params.choice[r], 0);
        *drawn = Draw(row, most, params.temperature[r])(params.top_k[r], params.top_p[r], params.min_p[r], bits);
    }
    return 0;
}

void sample_row(const SampleKernels& kernels, const float* logits, const SampleParams& params, int r, uint8_t* scratch,
                const SampleResult& result) {
    const int n = params.vocab_size;
    const RowMemory memory(scratch, n);
    const Row raw = {kernels, logits, n, memory.raw_maxima, memory.spare, memory.sums, memory.ids};
    if (!raw.scan() || !std::isfinite(raw.most())) {
        result.errors[r] = kBadLogits;
        return;
    }
    if (params.targets[r] >= 0) {
        result.ids[r] = params.targets[r];
    } else if ((result.errors[r] = draw_row(raw, params, r, memory, result.ids + r)) != 0) {
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
    return pieces * (kSamplePiece * (sizeof(float) + sizeof(int32_t)) + sizeof(uint64_t) + 3 * sizeof(float));
}

void sample(const StepContext& step, int first, int count, const Rows& logits, const SampleParams& params,
            const SampleResult& result) {
    step.pool.run(count, [&](int row, int thread) {
        sample_row(*step.kernels.sample, logits.row(row), params, first + row, step.scratch_of(thread), result);
    });
}

}  // namespace pelton
