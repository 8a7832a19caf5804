#include "text/sentencepiece.h"

#include <algorithm>
#include <queue>
#include <tuple>

#include "text/utf8.h"

namespace pelton {

// A stretch of the text: a token, or (id < 0) a character that is none. Symbols form a list by their numbers.
struct SentencePiece::Symbol {
    size_t begin, size;  // size 0: joined with the one before it
    int32_t id;
    int64_t previous, next;
};

// Two neighbours that can be joined, as they were when that was found.
struct SentencePiece::Pair {
    int32_t rank, left_id, right_id, id;
    int64_t left;

    // For a queue whose top comes first: the best rank; of one token's several splits that of the lowest ids; the
    // leftmost.
    bool operator<(const Pair& other) const {
        return std::tie(rank, left_id, right_id, left) >
               std::tie(other.rank, other.left_id, other.right_id, other.left);
    }
};

class SentencePiece::Joining {
  public:
    Joining(const SentencePiece& pieces, std::string_view text) : pieces_(pieces), text_(text) {
        for (size_t begin = 0; begin < text.size();) {
            const size_t size = std::min(character_size(text[begin]), text.size() - begin);
            const auto number = static_cast<int64_t>(symbols_.size());
            symbols_.push_back(
                {begin, size, pieces.vocabulary_.id_of(text.substr(begin, size)), number - 1, number + 1});
            begin += size;
        }
        if (!symbols_.empty()) symbols_.back().next = -1;
        for (size_t i = 0; i + 1 < symbols_.size(); i++) consider(static_cast<int64_t>(i));
    }

    void join_all() {
        while (!pairs_.empty()) {
            const Pair pair = pairs_.top();
            pairs_.pop();
            if (stands(pair)) join(pair);
        }
    }

    std::vector<int32_t> ids() const {
        std::vector<int32_t> ids;
        for (const Symbol& symbol : symbols_) {
            if (symbol.id >= 0 && symbol.size > 0) ids.push_back(symbol.id);
            if (symbol.id >= 0) continue;
            for (const char byte : text_.substr(symbol.begin, symbol.size))
                ids.push_back(pieces_.byte_ids_[static_cast<uint8_t>(byte)]);
        }
        return ids;
    }

  private:
    Symbol& at(int64_t number) { return symbols_[static_cast<size_t>(number)]; }

    // Queue a symbol and its right neighbour if they are a token together.
    void consider(int64_t left) {
        if (left < 0 || at(left).next < 0) return;
        const Symbol &first = at(left), &second = at(first.next);
        if (first.id < 0 || second.id < 0) return;
        const int32_t id = pieces_.vocabulary_.id_of(text_.substr(first.begin, first.size + second.size));
        if (id < 0) return;
        const int32_t rank = pieces_.ranks_[static_cast<size_t>(id)];
        if (rank >= 0) pairs_.push({rank, first.id, second.id, id, left});
    }

    bool stands(const Pair& pair) {
        const Symbol& left = at(pair.left);
        return left.size > 0 && left.id == pair.left_id && left.next >= 0 && at(left.next).id == pair.right_id;
    }

    void join(const Pair& pair) {
        Symbol& left = at(pair.left);
        Symbol& right = at(left.next);
        left.size += right.size;
        left.id = pair.id;
        left.next = right.next;
        right.size = 0;
        if (left.next >= 0) at(left.next).previous = pair.left;
        consider(left.previous);
        consider(pair.left);
    }

    const SentencePiece& pieces_;
    std::string_view text_;
    std::vector<Symbol> symbols_;
    std::priority_queue<Pair> pairs_;
};

SentencePiece::SentencePiece(const Vocabulary& vocabulary, const int32_t* ranks, const int32_t* byte_ids)
    : vocabulary_(vocabulary), ranks_(ranks, ranks + vocabulary.size()), byte_ids_(byte_ids, byte_ids + 256) {}

std::vector<int32_t> SentencePiece::encode(std::string_view text) const {
    Joining joining(*this, text);
    joining.join_all();
    return joining.ids();
}

}  // namespace pelton
