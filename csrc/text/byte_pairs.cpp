#include "text/byte_pairs.h"

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <tuple>

#include "text/utf8.h"

namespace pelton {
namespace {

// Walks over a text once, from one border of a word to the next.
class Borders {
  public:
    explicit Borders(std::string_view text) : text_(text) {}
    size_t byte_of(size_t character) {
        for (; character_ < character && byte_ < text_.size(); character_++) byte_ += character_size(text_[byte_]);
        return std::min(byte_, text_.size());
    }

  private:
    std::string_view text_;
    size_t byte_ = 0, character_ = 0;
};

}  // namespace

// One word's symbols, a list by their numbers. Used for one word after another.
class BytePairs::Joining {
  public:
    explicit Joining(const BytePairs& pairs) : pairs_(pairs) {}

    void append(std::string_view word, std::vector<int32_t>& ids) {
        begin(word);
        while (!queue_.empty()) {
            const Pair pair = queue_.front();
            std::pop_heap(queue_.begin(), queue_.end());
            queue_.pop_back();
            if (stands(pair)) join(pair);
        }
        for (int32_t i = symbols_.empty() ? -1 : 0; i >= 0; i = at(i).next) ids.push_back(at(i).id);
    }

  private:
    struct Symbol {
        int32_t id, previous, next;
        bool is_joined;  // with the one before it
    };
    struct Pair {
        int32_t rank, left, id;

        // For a heap whose front comes first: the best rank, of equal ones the leftmost.
        bool operator<(const Pair& other) const { return std::tie(rank, left) > std::tie(other.rank, other.left); }
    };

    Symbol& at(int32_t number) { return symbols_[static_cast<size_t>(number)]; }

    void begin(std::string_view word) {
        symbols_.clear();
        queue_.clear();
        for (const char byte : word) {
            const int32_t id = pairs_.byte_ids_[static_cast<uint8_t>(byte)];
            const auto number = static_cast<int32_t>(symbols_.size());
            if (id >= 0) symbols_.push_back({id, number - 1, number + 1, false});
        }
        if (!symbols_.empty()) symbols_.back().next = -1;
        for (size_t i = 0; i + 1 < symbols_.size(); i++) consider(static_cast<int32_t>(i));
    }

    void consider(int32_t left) {
        if (left < 0 || at(left).next < 0) return;
        if (const Merge* merge = pairs_.find(at(left).id, at(at(left).next).id)) {
            queue_.push_back({merge->rank, left, merge->id});
            std::push_heap(queue_.begin(), queue_.end());
        }
    }

    // Neighbours that have changed since are still joined, in their old turn, where they give the same token.
    bool stands(const Pair& pair) {
        const Symbol& left = at(pair.left);
        if (left.is_joined || left.next < 0) return false;
        const Merge* merge = pairs_.find(left.id, at(left.next).id);
        return merge != nullptr && merge->id == pair.id;
    }

    void join(const Pair& pair) {
        Symbol& left = at(pair.left);
        Symbol& right = at(left.next);
        left.id = pair.id;
        left.next = right.next;
        right.is_joined = true;
        if (left.next >= 0) at(left.next).previous = pair.left;
        consider(left.previous);
        consider(pair.left);
    }

    const BytePairs& pairs_;
    std::vector<Symbol> symbols_;
    std::vector<Pair> queue_;
};

BytePairs::BytePairs(const Vocabulary& vocabulary, EncodedStrings merges, std::array<std::string, 256> characters,
                     bool takes_words)
    : vocabulary_(vocabulary),
      characters_(std::move(characters)),
      takes_words_(takes_words),
      slots_(std::bit_ceil(2 * merges.count + 1), -1) {
    for (size_t byte = 0; byte < byte_ids_.size(); byte++) byte_ids_[byte] = vocabulary.id_of(characters_[byte]);
    merges_.reserve(merges.count);
    for (size_t i = 0; i < merges.count; i++) add(take_string(merges.data), static_cast<int32_t>(i));
}

void BytePairs::add(std::string_view merge, int32_t rank) {
    const auto is_wrong = [rank](const char* what) {
        return std::invalid_argument(std::string("[").append(std::to_string(rank)).append("]").append(what));
    };
    const size_t space = merge.find(' ');
    if (space == merge.npos) throw is_wrong(" is no pair");
    const std::string_view left = merge.substr(0, space), right = merge.substr(space + 1);
    std::string both(left);
    both += right;
    const Merge made{vocabulary_.id_of(left), vocabulary_.id_of(right), rank, vocabulary_.id_of(both)};
    if (made.left < 0 || made.right < 0 || made.id < 0) throw is_wrong(": a part of it, or its whole, is no token");
    int32_t& slot = slots_[slot_of(made.left, made.right)];
    if (slot >= 0) {
        merges_[static_cast<size_t>(slot)] = made;
        return;
    }
    slot = static_cast<int32_t>(merges_.size());
    merges_.push_back(made);
}

// Where a pair is in the table, or would be.
size_t BytePairs::slot_of(int32_t left, int32_t right) const {
    const uint64_t pair = static_cast<uint64_t>(left) << 32 | static_cast<uint32_t>(right);
    size_t slot = hash_(0, pair) & (slots_.size() - 1);
    while (slots_[slot] >= 0) {
        const Merge& merge = merges_[static_cast<size_t>(slots_[slot])];
        if (merge.left == left && merge.right == right) break;
        slot = (slot + 1) & (slots_.size() - 1);
    }
    return slot;
}

const BytePairs::Merge* BytePairs::find(int32_t left, int32_t right) const {
    const int32_t index = slots_[slot_of(left, right)];
    return index < 0 ? nullptr : &merges_[static_cast<size_t>(index)];
}

// The token that a whole word is, or -1.
int32_t BytePairs::whole(std::string_view word) const {
    std::string text;
    for (const char byte : word) text += characters_[static_cast<uint8_t>(byte)];
    return vocabulary_.id_of(text);
}

std::vector<int32_t> BytePairs::encode(std::string_view text, const Words& words) const {
    std::vector<int32_t> ids;
    Joining joining(*this);
    Borders borders(text);
    for (const auto& [first, last] : words) {
        const size_t begin = borders.byte_of(first);
        const std::string_view word = text.substr(begin, borders.byte_of(last) - begin);
        const int32_t id = takes_words_ ? whole(word) : -1;
        if (id >= 0)
            ids.push_back(id);
        else
            joining.append(word, ids);
    }
    return ids;
}

}  // namespace pelton
