#include "memory.h"

#include <sys/mman.h>

#include <new>

namespace pelton {

constexpr size_t kHugePage = size_t{2} << 20;

Memory::Memory(size_t bytes) : size_(bytes) {
    if (bytes == 0) return;
    // Whole huge pages, so that the last one is huge too; small memory stays on small pages.
    mapped_ = bytes < kHugePage ? bytes : (bytes + kHugePage - 1) / kHugePage * kHugePage;
    void* memory = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
    if (bytes >= kHugePage) madvise(memory, mapped_, MADV_HUGEPAGE);  // advice: without it all is right, only slower
#endif
    data_ = static_cast<uint8_t*>(memory);
}

Memory::~Memory() {
    if (data_) munmap(data_, mapped_);
}

}  // namespace pelton
