#include "ops/linear.h"

#include <algorithm>

namespace pelton {
namespace {

// A chunk should take some microseconds, so that handing it out costs nothing, but no more than a small share of the
// whole, so that a thread which the machine slows down holds up nobody. Few rows: their time is that of the weights'
// bytes, read in long runs. Many rows: there is work enough for more and smaller chunks.
constexpr int kManyRows = 32;
constexpr size_t kFewRowsChunks = 4, kManyRowsChunks = 16;  // per thread
constexpr size_t kLeastChunkBytes = 24 << 10;               // at one row
constexpr int kManyRowsTiles = 4;                           // at least, per chunk: long enough runs of each row
constexpr int kRowsAhead = 6;

size_t bytes_per_tile(const Linear& linear) { return linear.product.weight.tile_bytes + linear.up.weight.tile_bytes; }

// Tiles [t0, t1) of one product into `out` (column 16 * t0 first), bias added.
void multiply(const StepContext& context, const Product& product, int M, int t0, int t1, int thread, float* out,
              size_t stride) {
    const Matrix& weight = product.weight;
    weight.kernel->run(weight.tiles, product.x, M, weight.K, out - static_cast<ptrdiff_t>(t0) * kTileRows, stride, t0,
                       t1, context.scratch_of(thread));
    if (!product.bias) return;
    const int n0 = t0 * kTileRows, count = std::min(t1 * kTileRows, weight.N) - n0;
    for (int m = 0; m < M; m++) {
        float* row = out + static_cast<size_t>(m) * stride;
        context.kernels.rows->add(row, product.bias + n0, count, row);
    }
}

void finish_row(const RowKernels& rows, const Linear& linear, int m, int n0, int count, const float* up) {
    float* out = linear.out.row(m) + n0;
    switch (linear.epilogue) {
        case Linear::Epilogue::Plain:
            return;
        case Linear::Epilogue::Add:
            return rows.add(linear.residual.row(m) + n0, out, count, out);
        case Linear::Epilogue::Act:
            return rows.act(linear.activation, out, count, out);
        case Linear::Epilogue::Glu:
            return rows.glu(linear.activation, out, up, count, out);
        case Linear::Epilogue::Softcap:
            return rows.softcap(out, linear.cap, count, out);
    }
}

// A chunk reads a few columns of each row: too short a run for the processor to see it coming.
void prefetch_residual(const Linear& linear, int m, int M, int n0, int count) {
    if (linear.epilogue != Linear::Epilogue::Add || m >= M) return;
    for (int n = 0; n < count; n += kTileRows) __builtin_prefetch(linear.residual.row(m) + n0 + n);
}

void run_chunk(const StepContext& context, const Linear& linear, int M, int t0, int t1, int thread) {
    const int n0 = t0 * kTileRows, count = std::min(t1 * kTileRows, linear.product.weight.N) - n0;
    const auto stride = static_cast<size_t>(linear.out.stride);
    multiply(context, linear.product, M, t0, t1, thread, linear.out.data + n0, stride);
    if (linear.epilogue == Linear::Epilogue::Plain) return;
    float* up = context.epilogue_of(thread);
    const size_t up_stride = static_cast<size_t>(t1 - t0) * kTileRows;
    if (linear.epilogue == Linear::Epilogue::Glu) multiply(context, linear.up, M, t0, t1, thread, up, up_stride);
    for (int m = 0; m < M; m++) {
        prefetch_residual(linear, m + kRowsAhead, M, n0, count);
        finish_row(*context.kernels.rows, linear, m, n0, count, up + static_cast<size_t>(m) * up_stride);
    }
}

}  // namespace

void run_linears(const StepContext& context, const std::vector<Linear>& linears, int M) {
    size_t total = 0;
    for (const Linear& linear : linears)
        total += bytes_per_tile(linear) * static_cast<size_t>(linear.product.weight.num_tiles());
    const size_t chunks_per_thread = M < kManyRows ? kFewRowsChunks : kManyRowsChunks;
    const size_t share = total / (chunks_per_thread * static_cast<size_t>(context.pool.size()));
    const size_t wanted = std::max(share, kLeastChunkBytes / static_cast<size_t>(M));
    const int most = static_cast<int>(context.epilogue_bytes / (static_cast<size_t>(M) * kTileRows * sizeof(float)));

    struct Cut {
        int tiles_per_chunk, first_chunk;
    };
    std::vector<Cut> cuts(linears.size());
    int num_chunks = 0;
    for (size_t i = 0; i < linears.size(); i++) {
        // An even number of tiles: kernels like to work on two at once.
        const int fit = static_cast<int>((wanted / bytes_per_tile(linears[i]) + 1) / 2 * 2);
        const int least = std::min(M < kManyRows ? 1 : kManyRowsTiles, most);
        cuts[i] = {std::clamp(fit, least, most), num_chunks};
        num_chunks += (linears[i].product.weight.num_tiles() + cuts[i].tiles_per_chunk - 1) / cuts[i].tiles_per_chunk;
    }
    context.pool.run(num_chunks, [&](int chunk, int thread) {
        size_t i = linears.size() - 1;
        while (cuts[i].first_chunk > chunk) i--;
        const int t0 = (chunk - cuts[i].first_chunk) * cuts[i].tiles_per_chunk;
        const int t1 = std::min(t0 + cuts[i].tiles_per_chunk, linears[i].product.weight.num_tiles());
        run_chunk(context, linears[i], M, t0, t1, thread);
    });
}

}  // namespace pelton
