// Row kernels, attention and sampling against the generic instruction set: near, since not every set has a fused
// multiply-add; and the same bits for a row alone.
#include <algorithm>
#include <cstring>

#include "kernels/race.h"
#include "selftest.h"

namespace selftest {

using namespace pelton;

namespace {

constexpr float kTolerance = 2e-5f;
constexpr int kWidths[] = {1, 16, 63, 64, 100, 576};

using Floats = std::vector<float>;

template <class F>
void compare(Counts& counts, const char* what, int width, size_t size, const F& run, const RowKernels& table,
             const RowKernels& plain) {
    Floats got(size, 1e30f), want(size, 1e30f);
    run(table, got.data());
    run(plain, want.data());
    counts.add(are_near(got, want, kTolerance), "rows", what, width);
}

void check_width(const RowKernels& table, const RowKernels& plain, int n, Counts& counts) {
    Random random{static_cast<uint64_t>(n)};
    const Floats x = random.floats(2 * n, -4, 4), y = random.floats(2 * n, -4, 4), weight = random.floats(n, 0.5f, 2);
    const auto size = static_cast<size_t>(n);
    const auto check = [&](const char* what, size_t out, const auto& run) {
        compare(counts, what, n, out, run, table, plain);
    };
    check("rms_norm", 2 * size,
          [&](const RowKernels& k, float* out) { k.rms_norm(x.data(), weight.data(), n, 2, 1e-6f, out); });
    check("layer_norm", size,
          [&](const RowKernels& k, float* out) { k.layer_norm(x.data(), weight.data(), y.data(), n, 1e-5f, out); });
    check("add", size, [&](const RowKernels& k, float* out) { k.add(x.data(), y.data(), n, out); });
    check("mul", size, [&](const RowKernels& k, float* out) { k.mul(x.data(), y.data(), n, out); });
    check("scale", size, [&](const RowKernels& k, float* out) { k.scale(x.data(), 0.37f, n, out); });
    check("softcap", size, [&](const RowKernels& k, float* out) { k.softcap(x.data(), 3, n, out); });
    for (int kind = 0; kind <= static_cast<int>(Activation::Softplus); kind++) {
        const auto activation = static_cast<Activation>(kind);
        check("act", size, [&](const RowKernels& k, float* out) { k.act(activation, x.data(), n, out); });
        check("glu", size, [&](const RowKernels& k, float* out) { k.glu(activation, x.data(), y.data(), n, out); });
    }
}

// One piece of keys, its rows, and what the kernels make of them.
struct Attention {
    const AttentionKernel& kernel;
    int head_dim, value_dim, window;
    float softcap;
    std::vector<Bytes> blocks;

    // Keys and values of the whole piece.
    void fill(Random random) {
        for (int b = 0; b < kPieceTokens / kBlockTokens; b++) {
            blocks.emplace_back(static_cast<size_t>(kBlockTokens) * static_cast<size_t>(head_dim + value_dim + 64) * 4);
            std::memset(blocks.back().data(), 0, size_t{kBlockTokens} * static_cast<size_t>(head_dim + value_dim) * 4);
        }
        for (int t = 0; t < kPieceTokens; t++) {
            const Floats key = random.floats(head_dim, -1, 1), value = random.floats(value_dim, -2, 2);
            kernel.store(key.data(), value.data(), head_dim, value_dim, t % kBlockTokens,
                         blocks[static_cast<size_t>(t / kBlockTokens)].data());
        }
    }
    // [rows, head_dim] -> [rows, value_dim]: the piece merged with itself, as if its keys came twice.
    Floats attend(const float* queries, const int32_t* positions, int rows) {
        Bytes prepared(query_bytes(rows, head_dim));
        for (int r = 0; r < rows; r++)
            kernel.put_query(queries + r * head_dim, 1.0f, r, rows, head_dim, prepared.data());
        AttendPiece piece = {prepared.data(), positions, rows,         head_dim, value_dim,
                             window,          softcap,   kPieceTokens, {},       {}};
        for (size_t b = 0; b < blocks.size(); b++) piece.blocks[b] = blocks[b].data();
        const int stride = padded_value_dim(value_dim);
        Floats maximum[2], sum[2], output[2];
        AttendPartial partial[2];
        for (int i = 0; i < 2; i++) {
            maximum[i].resize(static_cast<size_t>(rows));
            sum[i].resize(static_cast<size_t>(rows));
            output[i].resize(static_cast<size_t>(rows * stride));
            partial[i] = {maximum[i].data(), sum[i].data(), output[i].data()};
            kernel.piece(piece, partial[i]);
        }
        kernel.merge(rows, value_dim, partial[0], partial[1]);
        Floats out(static_cast<size_t>(rows * value_dim));
        for (int r = 0; r < rows; r++) kernel.finish(partial[0], r, value_dim, out.data() + r * value_dim);
        return out;
    }
};

void check_heads(const AttentionKernel& table, const AttentionKernel& plain, int head_dim, int value_dim, int window,
                 float softcap, Counts& counts) {
    constexpr int kRowCount = 41;
    Random random{static_cast<uint64_t>(head_dim + window)};
    Attention ours = {table, head_dim, value_dim, window, softcap, {}},
              theirs = {plain, head_dim, value_dim, window, softcap, {}};
    ours.fill(random);
    theirs.fill(random);
    const Floats queries = random.floats(kRowCount * head_dim, -0.5f, 0.5f);
    std::vector<int32_t> positions;
    // The first ones see nothing of the piece, and their results are no numbers.
    for (int r = 0; r < kRowCount; r++) positions.push_back(kPieceTokens - 20 + r * 7);
    const Floats all = ours.attend(queries.data(), positions.data(), kRowCount);
    counts.add(are_near(all, theirs.attend(queries.data(), positions.data(), kRowCount), kTolerance), "attention",
               "value", head_dim);
    bool is_alone_same = true;
    for (int r = 0; r < kRowCount; r++) {
        const Floats one = ours.attend(queries.data() + r * head_dim, positions.data() + r, 1);
        is_alone_same &= !std::memcmp(one.data(), all.data() + r * value_dim, one.size() * sizeof(float));
    }
    counts.add(is_alone_same, "attention", "alone", head_dim);
}

}  // namespace

void check_rows(const KernelTable& table, const KernelTable& plain, Counts& counts) {
    for (const int n : kWidths) check_width(*table.rows, *plain.rows, n, counts);
    constexpr int kHeads = 3;
    for (const int dim : {2, 32, 64, 80}) {
        const int head_dim = dim + 16;
        Random random{static_cast<uint64_t>(dim)};
        const Floats x = random.floats(kHeads * head_dim, -4, 4), angles = random.floats(dim, -1, 1);
        const auto run = [&](const RowKernels& k, float* out) {
            k.rope(x.data(), angles.data(), kHeads, head_dim, dim, out);
        };
        compare(counts, "rope", dim, x.size(), run, *table.rows, *plain.rows);
    }
    counts.report("rows");
}

void check_attention(const KernelTable& table, const KernelTable& plain, Counts& counts) {
    for (int type = 0; type < kNumKVTypes; type++) {
        const AttentionKernel &ours = table.attention[type], &theirs = plain.attention[type];
        check_heads(ours, theirs, 64, 64, 0, 0, counts);
        check_heads(ours, theirs, 80, 80, 100, 0, counts);
        check_heads(ours, theirs, 192, 128, 0, 30, counts);
        check_heads(ours, theirs, 36, 20, 7, 0, counts);
    }
    counts.report("attention");
}

void check_limits(const KernelTable& table, const KernelTable& plain, Counts& counts) {
    Bytes bytes(1024);
    Random random{1};
    for (int i = 0; i < 1024; i++) bytes.data()[i] = static_cast<uint8_t>(random());
    const uint32_t sum = table.limits->read(bytes.data(), 1024);
    counts.add(sum == plain.limits->read(bytes.data(), 1024), "limits", "read", 1024);
    if (table.bf16_products) {
        for (const int num_steps : {4, 256})
            counts.add(table.bf16_products(num_steps) == 32.0f * static_cast<float>(num_steps), "limits", "tiles",
                       num_steps);
    }
    counts.report("limits");
}

void check_sample(const KernelTable& table, const KernelTable& plain, Counts& counts) {
    for (const int n : {1, 255, 256, 1000}) {
        Random random{static_cast<uint64_t>(n)};
        Floats x = random.floats(n, -20, 5);
        const auto pieces = static_cast<size_t>((n + kSamplePiece - 1) / kSamplePiece);
        const SampleKernels *ours = table.sample, *theirs = plain.sample;
        Floats maxima(pieces), want(pieces);
        const bool is_number = ours->maxima(x.data(), n, maxima.data()) && theirs->maxima(x.data(), n, want.data());
        counts.add(is_number && maxima == want, "sample", "maxima", n);
        float most = maxima[0];
        for (const float value : maxima) most = std::fmax(most, value);
        const double sum = ours->exp_sum(x.data(), n, most), other = theirs->exp_sum(x.data(), n, most);
        counts.add(std::fabs(sum - other) <= 1e-6 * other, "sample", "exp_sum", n);

        std::vector<int32_t> weights(static_cast<size_t>(n)), places(static_cast<size_t>(n));
        ours->weigh(x.data(), n, most, 0.7f, weights.data());
        bool is_near = true;
        for (int i = 0; i < n; i++) {
            const float exact = kWeightOne * std::exp((x[static_cast<size_t>(i)] - most) * 0.7f);
            is_near &= std::fabs(static_cast<float>(weights[static_cast<size_t>(i)]) - exact) <= 2 + 1e-5f * exact;
        }
        counts.add(is_near, "sample", "weigh", n);
        std::vector<uint64_t> sums(pieces), total(pieces);
        ours->weigh_pieces(x.data(), n, maxima.data(), most, 0.7f, sums.data());
        for (int i = 0; i < n; i++)
            total[static_cast<size_t>(i / kSamplePiece)] += static_cast<uint64_t>(weights[static_cast<size_t>(i)]);
        counts.add(sums == total, "sample", "weigh_pieces", n);

        const auto largest = std::max_element(x.begin(), x.begin() + n) - x.begin();
        for (uint64_t bits : {uint64_t{0}, uint64_t{0x9e3779b97f4a7c15}, ~uint64_t{0}}) {
            Race race;
            for (int i = 0; i < n; i++) {
                if (weights[static_cast<size_t>(i)] > 0) race.enter(i, weights[static_cast<size_t>(i)], bits);
            }
            const int32_t won = ours->race(x.data(), n, maxima.data(), most, 0.7f, bits, static_cast<int32_t>(largest));
            counts.add(won == race.id, "sample", "race", n);
        }

        std::vector<int32_t> expected;
        for (int i = 0; i < n; i++)
            if (x[static_cast<size_t>(i)] >= 0) expected.push_back(i);
        places.resize(static_cast<size_t>(ours->collect(x.data(), n, maxima.data(), 0, places.data())));
        counts.add(places == expected, "sample", "collect", n);
        x[static_cast<size_t>(n / 2)] = NAN;
        counts.add(!ours->maxima(x.data(), n, maxima.data()), "sample", "nan", n);
    }
    counts.report("sample");
}

}  // namespace selftest
