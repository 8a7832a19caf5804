#include "stored.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>

namespace pelton {
namespace {

constexpr size_t kLanes = 8;
constexpr size_t kStripe = kLanes * sizeof(uint64_t);
constexpr size_t kPiece = size_t{256} << 10;  // read and checked while it is in the second-level cache

// Each step is a bijection of the lane for a given word, and of the word for a given lane: no single change is lost.
// The lanes are independent, so that the multiplications overlap.
class Checksum {
  public:
    // `bytes` is a multiple of the stripe in all calls but the last.
    void add(const uint8_t* data, size_t bytes) {
        size_t done = 0;
        for (; done + kStripe <= bytes; done += kStripe) step(data + done);
        if (done < bytes) {
            uint8_t last[kStripe] = {};
            std::memcpy(last, data + done, bytes - done);
            step(last);
        }
        length_ += bytes;
    }

    uint64_t value() const {
        uint64_t sum = length_;
        for (uint64_t lane : lanes_) sum = mix(sum, lane);
        return sum ^ (sum >> 32);
    }

  private:
    static uint64_t mix(uint64_t sum, uint64_t word) {
        return (std::rotl(sum, 29) ^ word) * uint64_t{0x9E3779B97F4A7C15};  // odd: multiplying loses nothing
    }
    void step(const uint8_t* stripe) {
        uint64_t words[kLanes];
        std::memcpy(words, stripe, kStripe);
        for (size_t i = 0; i < kLanes; i++) lanes_[i] = mix(lanes_[i], words[i]);
    }

    uint64_t lanes_[kLanes] = {1, 2, 3, 4, 5, 6, 7, 8};
    uint64_t length_ = 0;
};

bool read_whole(int fd, uint64_t offset, uint8_t* out, size_t bytes) {
    while (bytes > 0) {
        const ssize_t count = pread(fd, out, bytes, static_cast<off_t>(offset));
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) return false;
        offset += static_cast<uint64_t>(count);
        out += count;
        bytes -= static_cast<size_t>(count);
    }
    return true;
}

bool read_chunk(int fd, uint64_t offset, uint8_t* out, size_t bytes, uint64_t expected) {
    Checksum sum;
    for (size_t done = 0; done < bytes; done += kPiece) {
        const size_t piece = std::min(kPiece, bytes - done);
        if (!read_whole(fd, offset + done, out + done, piece)) return false;
        sum.add(out + done, piece);
    }
    return sum.value() == expected;
}

}  // namespace

uint64_t checksum(const uint8_t* data, size_t bytes) {
    Checksum sum;
    sum.add(data, bytes);
    return sum.value();
}

bool read_stored(ThreadPool& pool, int fd, uint64_t offset, uint8_t* out, size_t bytes, const uint64_t* checksums) {
    std::atomic<bool> is_good{true};
    pool.run(static_cast<int>((bytes + kStoredChunk - 1) / kStoredChunk), [&](int chunk, int) {
        if (!is_good.load(std::memory_order_relaxed)) return;
        const size_t start = static_cast<size_t>(chunk) * kStoredChunk;
        const size_t count = std::min(kStoredChunk, bytes - start);
        if (!read_chunk(fd, offset + start, out + start, count, checksums[chunk])) is_good = false;
    });
    return is_good;
}

}  // namespace pelton
