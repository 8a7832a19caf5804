// SentencePiece's BPE: of two neighbours that are a token together, those are joined whose token has the best rank.
//
// Unlike BPE with a table of merges it needs nothing but the tokens: any two neighbours may be joined whose texts
// together are one. tests/kernels/test_sentencepiece.py has the definition.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "text/vocabulary.h"

namespace pelton {

class SentencePiece {
  public:
    // ranks[i]: when token i is joined, the lowest first; kNeverJoined: it is only found as a single character.
    // byte_ids: the tokens of bytes 0 to 255, for characters that are no tokens. The vocabulary is not copied.
    static constexpr int32_t kNeverJoined = -1;
    SentencePiece(const Vocabulary& vocabulary, const int32_t* ranks, const int32_t* byte_ids);

    // The ids of a text in UTF-8. Any number of threads may call it at once.
    std::vector<int32_t> encode(std::string_view text) const;

  private:
    struct Symbol;
    struct Pair;
    class Joining;

    const Vocabulary& vocabulary_;
    std::vector<int32_t> ranks_;
    std::vector<int32_t> byte_ids_;
};

}  // namespace pelton
