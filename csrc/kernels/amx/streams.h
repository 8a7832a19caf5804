// streams.h: packed weights as streams from memory: unpacking asks for what comes next, as many bytes as it used.
#pragma once

#include "kernels/amx/weights.h"

namespace pelton::amx {

// kColumnTiles neighbouring weight tiles, walked together from step to step.
template <class Weights, int kColumnTiles>
class WeightStreams {
  public:
    WeightStreams(const uint8_t* tiles, int K) : tiles_(tiles), tile_bytes_(Layout<Weights>::tile_bytes(K)) {}

    const uint8_t* tile(int i) const { return tiles_ + static_cast<size_t>(i) * tile_bytes_; }

    // Unpacks one step of tile `first` + c, and has L1 fetch what comes a little later.
    void unpack(int first, int c, int step, uint16_t* operand) const {
        fetch<_MM_HINT_T0>(tile(first + c), step, kNear);
        unpack_step<Weights>(tile(first + c), step, operand);
    }
    // Has L2 fetch what comes well after a step.
    void fetch_far(int first, int c, int step) const { fetch<_MM_HINT_T1>(tile(first + c), step, kFar); }

  private:
    // Distances in bytes of one tile's stream: a group (of 16-bit floats half a group), and three more.
    static constexpr size_t kLongest = 4096, kGroup = Layout<Weights>::kGroupBytes;
    static constexpr size_t kNear = kGroup < kLongest ? kGroup : kLongest, kFar = 4 * kNear;

    // A stream that ends goes on in the tile after its neighbours.
    template <_mm_hint kHint>
    void fetch(const uint8_t* stream, int step, size_t distance) const {
        const size_t begin = Layout<Weights>::begin(step), bytes = Layout<Weights>::begin(step + 1) - begin;
        size_t offset = begin + distance;
        if (offset >= tile_bytes_) offset += (kColumnTiles - 1) * tile_bytes_;
        for (size_t i = 0; i < bytes; i += 64) _mm_prefetch(reinterpret_cast<const char*>(stream + offset + i), kHint);
    }

    const uint8_t* tiles_;
    const size_t tile_bytes_;
};

}  // namespace pelton::amx
