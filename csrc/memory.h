// memory.h: large anonymous memory in huge pages where the system has them, given back when it goes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pelton {

constexpr size_t kHugePage = size_t{2} << 20;

class Memory {
  public:
    // `bytes` zeros, at least 64-byte aligned, from a huge page's border where there is a whole one. Throws
    // std::bad_alloc.
    explicit Memory(size_t bytes);
    ~Memory();
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    uint8_t* data() const { return data_; }
    size_t size() const { return size_; }

  private:
    uint8_t* data_ = nullptr;
    size_t size_;
    size_t mapped_ = 0;
};

}  // namespace pelton
