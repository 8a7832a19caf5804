#include "memory.h"

#include <sys/mman.h>

#include <new>

namespace pelton {
namespace {

size_t round_up(size_t bytes) { return (bytes + kHugePage - 1) / kHugePage * kHugePage; }

// `bytes` (whole huge pages) that begin at the border of one: systems place a mapping anywhere.
uint8_t* map_aligned(size_t bytes) {
    const size_t room = bytes + kHugePage;
    void* memory = mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    uint8_t* start = static_cast<uint8_t*>(memory);
    const size_t before = (kHugePage - reinterpret_cast<uintptr_t>(start) % kHugePage) % kHugePage;
    if (before) munmap(start, before);
    if (before < kHugePage) munmap(start + before + bytes, kHugePage - before);
    return start + before;
}

}  // namespace

Memory::Memory(size_t bytes) : size_(bytes) {
    if (bytes == 0) return;
    if (bytes < kHugePage) {  // small memory stays on small pages
        void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) throw std::bad_alloc();
        data_ = static_cast<uint8_t*>(memory);
        mapped_ = bytes;
        return;
    }
    mapped_ = round_up(bytes);  // whole huge pages, so that the last one is huge too
    data_ = map_aligned(mapped_);
#if defined(MADV_HUGEPAGE)
    madvise(data_, mapped_, MADV_HUGEPAGE);  // advice: without it all is right, only slower
#endif
}

Memory::~Memory() {
    if (data_) munmap(data_, mapped_);
}

}  // namespace pelton
