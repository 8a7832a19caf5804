// SentencePiece's BPE: of two neighbours that are a token together, those are joined whose token has the best rank.
//
// Unlike BPE with a table of merges it needs nothing but the tokens: any two neighbours may be joined whose texts
// together are one. tests/kernels/test_sentencepiece.py has the definition.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace pelton {

class SentencePiece {
  public:
    // ranks[i]: when token i is joined, the lowest first; kNeverJoined: it is only found as a single character;
    // kNoText: no text becomes it. byte_ids: the tokens of bytes 0 to 255, for characters that are no tokens.
    static constexpr int32_t kNeverJoined = -1, kNoText = -2;
    SentencePiece(const std::vector<std::string_view>& tokens, const int32_t* ranks, const int32_t* byte_ids);

    // The ids of a text in UTF-8. Any number of threads may call it at once.
    std::vector<int32_t> encode(std::string_view text) const;

  private:
    struct Token {
        size_t begin;
        uint32_t size;
        int32_t rank;
    };
    struct Symbol;
    struct Pair;
    class Joining;

    std::string_view text_of(int32_t id) const;
    int32_t find(std::string_view text) const;

    std::string texts_;
    std::vector<Token> tokens_;
    std::vector<int32_t> byte_ids_;
    std::vector<int32_t> slots_;  // an id, or -1: open addressing, at most half full
    size_t longest_ = 0;
};

}  // namespace pelton
