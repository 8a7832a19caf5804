// stored.h: packed weights in a file: checksums of their chunks, and reading them back with all threads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "threads.h"

namespace pelton {

// A huge page: threads that read chunks of a huge-page arena never fault the same page in.
constexpr size_t kStoredChunk = size_t{2} << 20;

// 64 bits of any number of bytes. Not for adversaries: it finds torn writes and flipped bits, every change within one
// word of eight bytes for certain, at the speed of reading memory.
uint64_t checksum(const uint8_t* data, size_t bytes);

// Reads `bytes` of the file from `offset` into `out`, a chunk at a time, with all threads, and compares each chunk with
// its checksum. False: the file cannot be read, ends early, or holds something else; `out` then holds anything.
bool read_stored(ThreadPool& pool, int fd, uint64_t offset, uint8_t* out, size_t bytes, const uint64_t* checksums);

}  // namespace pelton
