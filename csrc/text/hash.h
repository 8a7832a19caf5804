// Hashes for tables of what a file holds.
#pragma once

#include <cstdint>
#include <random>

namespace pelton {

// Each one hashes otherwise, and nobody can tell how: else a file could be made whose tokens all fall on one place of a
// table, which then takes hours to fill.
class Hash {
  public:
    Hash() {
        std::random_device bits;
        const auto word = [&bits] { return static_cast<uint64_t>(bits()) << 32 | bits(); };
        seed_ = word();
        factor_ = word() | 1;
    }

    // That of the words so far, `hash`, and one more.
    uint64_t operator()(uint64_t hash, uint64_t word) const {
        const auto product = static_cast<unsigned __int128>(hash ^ word ^ seed_) * factor_;
        return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
    }

  private:
    uint64_t seed_, factor_;
};

}  // namespace pelton
