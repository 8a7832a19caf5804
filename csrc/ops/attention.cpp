// Attention's work: items of (sequence, KV head, a few tokens), each walking the pieces of 256 keys in order.
//
// An item that is a large share of the step (a long stream that decodes) is cut: several threads compute its pieces,
// and the results are merged in order afterwards: the same arithmetic, and so the same bits. Small items go to a thread
// some at a time, so that it knows what it will read next.
#include "ops/attention.h"

#include <algorithm>
#include <limits>
#include <vector>

namespace pelton {
namespace {

constexpr int kMinItemRows = 12;      // the fewest worth a walk, where the step has them
constexpr int kItemsPerThread = 4;    // the least that a step should hand out
constexpr int kChunksPerThread = 16;  // the most, if its items are small
constexpr int kStoreTokens = 16;      // tokens per chunk of the storing phase
constexpr size_t kMaxPartialBytes = size_t{16} << 20;

constexpr int kPieceBlocks = kPieceTokens / kBlockTokens;

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
constexpr size_t size(int n) { return static_cast<size_t>(n); }

struct Item {
    int sequence, kv_head;
    int token, num_tokens;        // rows of the step
    int first_piece, last_piece;  // [first, last) of the sequence's keys
    float* partials;              // results of its pieces, one after the other
};

// What is handed out: some items as a whole, or some pieces of one that was cut.
struct Chunk {
    int first_item, last_item;
    int first_piece, last_piece;
};

size_t partial_floats(int num_rows, int value_dim) {
    return 2 * size(ceil_div(num_rows, 16) * 16) + size(num_rows) * size(padded_value_dim(value_dim));
}

AttendPartial partial_at(float* memory, int num_rows) {
    const size_t column = size(ceil_div(num_rows, 16) * 16);
    return {memory, memory + column, memory + 2 * column};
}

class Attention {
  public:
    Attention(const StepContext& step, const AttendArgs& args)
        : step_(step),
          args_(args),
          cache_(*step.caches[args.group]),
          shape_(cache_.shape()),
          kernel_(step.kernels.attention[static_cast<int>(shape_.type)]),
          heads_per_kv_(args.num_heads / shape_.num_kv_heads) {}

    void run() {
        step_.pool.run(ceil_div(step_.batch.num_tokens, kStoreTokens), [&](int chunk, int) { store(chunk); });
        list_items();
        cut();
        step_.pool.run(static_cast<int>(chunks_.size()),
                       [&](int chunk, int thread) { run_chunk(chunks_[size(chunk)], thread); });
        if (cut_items_.empty()) return;
        step_.pool.run(static_cast<int>(cut_items_.size()),
                       [&](int i, int thread) { merge(items_[size(cut_items_[size(i)])], thread); });
    }

  private:
    int rows_of(const Item& item) const { return item.num_tokens * heads_per_kv_; }

    uint8_t* head_at(int sequence, int kv_head, int block) const {
        const int width = step_.batch.table_widths[args_.group];
        const int32_t* table = step_.batch.tables[args_.group] + size(sequence) * size(width);
        return cache_.layer(args_.slot) + size(table[block]) * shape_.layer_bytes() +
               size(kv_head) * shape_.head_bytes();
    }

    void store(int chunk) const {
        const BatchView& batch = step_.batch;
        const int begin = chunk * kStoreTokens, end = std::min(begin + kStoreTokens, batch.num_tokens);
        const int32_t* starts = batch.seq_starts;
        int sequence = static_cast<int>(std::upper_bound(starts, starts + batch.num_sequences + 1, begin) - starts) - 1;
        for (int t = begin; t < end; t++) {
            while (t >= starts[sequence + 1]) sequence++;
            const int position = batch.positions[t];
            for (int head = 0; head < shape_.num_kv_heads; head++) {
                kernel_.store(args_.k.row(t) + head * shape_.head_dim, args_.v.row(t) + head * shape_.value_dim,
                              shape_.head_dim, shape_.value_dim, position % kBlockTokens,
                              head_at(sequence, head, position / kBlockTokens));
            }
        }
    }

    // Fewer tokens per item where the step would otherwise not give every thread a few.
    int tokens_per_item() const {
        const int most = std::max(1, kernel_.item_rows / heads_per_kv_),
                  least = std::max(1, kMinItemRows / heads_per_kv_);
        const int share = ceil_div(step_.batch.num_tokens * shape_.num_kv_heads, kItemsPerThread * step_.pool.size());
        return std::clamp(share, least, most);
    }

    // The last tokens of a sequence come first: they see the most keys.
    void list_items() {
        const BatchView& batch = step_.batch;
        const int most = tokens_per_item();
        for (int sequence = 0; sequence < batch.num_sequences; sequence++) {
            const int begin = batch.seq_starts[sequence];
            for (int end = batch.seq_starts[sequence + 1]; end > begin; end -= most) {
                const int token = std::max(begin, end - most);
                const int seen = args_.window > 0 ? std::max(0, batch.positions[token] - args_.window + 1) : 0;
                for (int head = 0; head < shape_.num_kv_heads; head++) {
                    items_.push_back({sequence, head, token, end - token, seen / kPieceTokens,
                                      batch.positions[end - 1] / kPieceTokens + 1, nullptr});
                }
            }
        }
    }

    int64_t cost(const Item& item) const { return int64_t{rows_of(item)} * (item.last_piece - item.first_piece); }

    void cut() {
        int64_t total = 0, group = 0;
        for (const Item& item : items_) total += cost(item);
        const int64_t share = total / (kItemsPerThread * step_.pool.size()) + 1;
        const int64_t least = total / (kChunksPerThread * step_.pool.size());
        const int num_items = static_cast<int>(items_.size());
        for (int i = 0, first = 0; i < num_items; i++) {
            group += cost(items_[size(i)]);
            const bool is_cut = cut_item(i, share);
            if (is_cut && i > first) chunks_.push_back({first, i, 0, 0});
            if (!is_cut && group <= least && i + 1 < num_items) continue;
            if (!is_cut) chunks_.push_back({first, i + 1, 0, 0});
            first = i + 1;
            group = 0;
        }
    }

    // Whether an item was cut into chunks of about `share`; it is not if it hardly costs more.
    bool cut_item(int index, int64_t share) {
        Item& item = items_[size(index)];
        const int pieces = item.last_piece - item.first_piece;
        const size_t floats = size(pieces) * partial_floats(rows_of(item), shape_.value_dim);
        if (step_.pool.size() == 1 || pieces == 1 || 2 * cost(item) < 3 * share) return false;
        if ((partial_floats_ + floats) * sizeof(float) > kMaxPartialBytes) return false;
        item.partials = reinterpret_cast<float*>(step_.workspace) + partial_floats_;
        partial_floats_ += floats;
        cut_items_.push_back(index);
        const int per_chunk = ceil_div(pieces, static_cast<int>((cost(item) + share - 1) / share));
        for (int p = item.first_piece; p < item.last_piece; p += per_chunk)
            chunks_.push_back({index, index, p, std::min(p + per_chunk, item.last_piece)});
        return true;
    }

    // One item's queries as the kernel reads them, in a thread's scratch, and what is left of that.
    struct Queries {
        AttendPiece piece;
        float* free;
    };

    Queries gather(const Item& item, int thread) const {
        const int rows = rows_of(item), width = shape_.head_dim;
        uint8_t* queries = step_.scratch_of(thread);
        int32_t* positions = reinterpret_cast<int32_t*>(queries + query_bytes(rows, width));
        for (int r = 0; r < rows; r++) {
            const int t = item.token + r / heads_per_kv_, head = item.kv_head * heads_per_kv_ + r % heads_per_kv_;
            positions[r] = step_.batch.positions[t];
            kernel_.put_query(args_.q.row(t) + head * width, args_.scale, r, rows, width, queries);
        }
        return {{queries, positions, rows, width, shape_.value_dim, args_.window, args_.softcap, 0, {}, {}},
                reinterpret_cast<float*>(positions) + ceil_div(rows, 16) * 16};
    }

    // The blocks of a piece that some row of the item sees part of.
    void find_blocks(const Item& item, int piece, const uint8_t** blocks) const {
        const int32_t* positions = step_.batch.positions + item.token;
        const int first = positions[0], last = positions[item.num_tokens - 1];
        const int begin = args_.window > 0 ? std::max(0, first - args_.window + 1) : 0;
        for (int b = 0; b < kPieceBlocks; b++) {
            const int block = piece * kPieceBlocks + b;
            const bool is_seen = block >= begin / kBlockTokens && block <= last / kBlockTokens;
            blocks[b] = is_seen ? head_at(item.sequence, item.kv_head, block) : nullptr;
        }
    }

    // `next_item`: what the thread will walk after this item, if it knows.
    void run_piece(const Item& item, AttendPiece& piece, int index, const Item* next_item,
                   const AttendPartial& out) const {
        piece.first_position = index * kPieceTokens;
        find_blocks(item, index, piece.blocks);
        if (index + 1 < item.last_piece)
            find_blocks(item, index + 1, piece.next);
        else if (next_item)
            find_blocks(*next_item, next_item->first_piece, piece.next);
        else
            std::fill_n(piece.next, kPieceBlocks, nullptr);
        kernel_.piece(piece, out);
    }

    AttendPartial empty(float* memory, int rows) const {
        const AttendPartial state = partial_at(memory, rows);
        std::fill_n(state.maximum, rows, -std::numeric_limits<float>::infinity());
        std::fill_n(state.sum, rows, 0.0f);
        std::fill_n(state.output, rows * padded_value_dim(shape_.value_dim), 0.0f);
        return state;
    }

    void finish(const Item& item, const AttendPartial& state) const {
        for (int r = 0; r < rows_of(item); r++) {
            const int head = item.kv_head * heads_per_kv_ + r % heads_per_kv_;
            float* out = args_.out.row(item.token + r / heads_per_kv_) + head * shape_.value_dim;
            kernel_.finish(state, r, shape_.value_dim, out);
        }
    }

    void run_chunk(const Chunk& chunk, int thread) const {
        if (chunk.first_item == chunk.last_item) return fill(chunk, thread);
        const Item *item = &items_[size(chunk.first_item)], *last = &items_[size(chunk.last_item - 1)];
        for (; item <= last; item++) walk(*item, item < last ? item + 1 : nullptr, thread);
    }

    void walk(const Item& item, const Item* next_item, int thread) const {
        auto [piece, free] = gather(item, thread);
        const AttendPartial state = empty(free, piece.num_rows);
        const AttendPartial one = partial_at(free + partial_floats(piece.num_rows, shape_.value_dim), piece.num_rows);
        for (int p = item.first_piece; p < item.last_piece; p++) {
            run_piece(item, piece, p, next_item, one);
            kernel_.merge(piece.num_rows, shape_.value_dim, state, one);
        }
        finish(item, state);
    }

    AttendPartial piece_result(const Item& item, int piece) const {
        const int rows = rows_of(item);
        return partial_at(item.partials + size(piece - item.first_piece) * partial_floats(rows, shape_.value_dim),
                          rows);
    }

    void fill(const Chunk& chunk, int thread) const {
        const Item& item = items_[size(chunk.first_item)];
        AttendPiece piece = gather(item, thread).piece;
        for (int p = chunk.first_piece; p < chunk.last_piece; p++)
            run_piece(item, piece, p, nullptr, piece_result(item, p));
    }

    void merge(const Item& item, int thread) const {
        const AttendPartial state = empty(reinterpret_cast<float*>(step_.scratch_of(thread)), rows_of(item));
        for (int p = item.first_piece; p < item.last_piece; p++) {
            kernel_.merge(rows_of(item), shape_.value_dim, state, piece_result(item, p));
        }
        finish(item, state);
    }

    const StepContext& step_;
    const AttendArgs& args_;
    KVCache& cache_;
    const KVShape& shape_;
    const AttentionKernel& kernel_;
    const int heads_per_kv_;
    std::vector<Item> items_;
    std::vector<Chunk> chunks_;
    std::vector<int> cut_items_;
    size_t partial_floats_ = 0;  // of the workspace, taken by items that are cut
};

}  // namespace

size_t attend_scratch(const KVShape& shape, int num_heads) {
    const int rows = std::max(kMaxItemRows, num_heads / shape.num_kv_heads);
    const size_t positions = size(ceil_div(rows, 16) * 16);
    return query_bytes(rows, shape.head_dim) + (positions + 2 * partial_floats(rows, shape.value_dim)) * sizeof(float);
}

size_t attend_workspace(const KVShape& shape, int num_heads, int max_context, int num_threads) {
    const int rows = std::max(kMaxItemRows, num_heads / shape.num_kv_heads);
    // Each item that is cut costs one and a half shares or more.
    const int items = kItemsPerThread * num_threads * 2 / 3, pieces = ceil_div(max_context, kPieceTokens);
    return std::min(kMaxPartialBytes,
                    size(items) * size(pieces) * partial_floats(rows, shape.value_dim) * sizeof(float));
}

void attend(const StepContext& step, const AttendArgs& args) { Attention(step, args).run(); }

}  // namespace pelton
