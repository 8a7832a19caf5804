// Byte-level BPE: of the pairs of neighbours that a table of merges knows, the one of the best rank is joined.
//
// tests/kernels/test_byte_pairs.py has the definition; the ids are those of the library `tokenizers`.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "text/hash.h"
#include "text/vocabulary.h"

namespace pelton {

class BytePairs {
  public:
    using Words = std::vector<std::pair<size_t, size_t>>;

    // merges: "left right" each, the best rank first; of equal pairs the last counts. characters: what stands for each
    // byte in the vocabulary's tokens; bytes whose character is no token are dropped. takes_words: a word that is
    // itself a token is that token, whatever the merges say. The vocabulary is not copied. Throws
    // std::invalid_argument for a merge whose tokens are not there.
    BytePairs(const Vocabulary& vocabulary, EncodedStrings merges, std::array<std::string, 256> characters,
              bool takes_words);

    // The ids of a text in UTF-8. Nothing is joined across the borders of `words`: [begin, end) of each in characters,
    // one behind the other. Any number of threads may call it at once.
    std::vector<int32_t> encode(std::string_view text, const Words& words) const;

  private:
    struct Merge {
        int32_t left, right;
        int32_t rank, id;
    };
    class Joining;

    void add(std::string_view merge, int32_t rank);
    size_t slot_of(int32_t left, int32_t right) const;
    const Merge* find(int32_t left, int32_t right) const;
    int32_t whole(std::string_view word) const;

    const Vocabulary& vocabulary_;
    std::array<std::string, 256> characters_;
    std::array<int32_t, 256> byte_ids_;
    bool takes_words_;
    Hash hash_;
    std::vector<Merge> merges_;
    std::vector<int32_t> slots_;  // an index of merges_, or -1: open addressing, at most half full
};

}  // namespace pelton
