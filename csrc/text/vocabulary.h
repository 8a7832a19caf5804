// A vocabulary's tokens: the text of each, and the token of a text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "text/hash.h"

namespace pelton {

// `count` strings as a GGUF file has them: of each the length in 8 bytes, little-endian, and then its bytes.
struct EncodedStrings {
    std::string_view data;
    size_t count;
};

// Takes the first string off `data`. Throws std::invalid_argument where there is no whole one.
std::string_view take_string(std::string_view& data);

// Takes up to `count` strings off `data`: how many whole ones there are.
size_t skip_strings(std::string_view& data, size_t count);

class Vocabulary {
  public:
    // Copies the strings. Throws std::invalid_argument where one is not UTF-8, or two are the same and not empty.
    explicit Vocabulary(EncodedStrings texts);

    size_t size() const { return tokens_.size(); }
    std::string_view text(int32_t id) const {
        const Token& token = tokens_[static_cast<size_t>(id)];
        return {texts_.data() + token.begin, token.size};
    }
    // The token of that text; -1 where there is none, or a hidden one.
    int32_t id_of(std::string_view text) const;
    // From now on no text is that token. Before the vocabulary is used by several threads.
    void hide(int32_t id) { tokens_[static_cast<size_t>(id)].is_hidden = true; }
    // Characters of the longest token.
    size_t longest() const;

  private:
    struct Token {
        uint32_t begin;
        uint32_t size : 31;
        bool is_hidden : 1;
    };

    uint64_t hash_of(std::string_view text) const;
    size_t slot_of(std::string_view text) const;

    Hash hash_;
    std::string texts_;
    std::vector<Token> tokens_;
    std::vector<int32_t> slots_;  // an id, or -1: open addressing, at most half full
    size_t most_bytes_ = 0;
};

}  // namespace pelton
