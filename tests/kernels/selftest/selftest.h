// selftest.h: what the checks share. Built with -DPELTON_SELFTEST=ON: a static program that checks the kernels of this
// CPU's instruction sets without Python, on a machine or in an emulator.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "kernels/table.h"

namespace selftest {

struct Random {
    uint64_t state;
    uint32_t operator()() {
        state = state * 6364136223846793005u + 1442695040888963407u;
        return static_cast<uint32_t>(state >> 33);
    }
    float uniform(float low, float high) { return low + (high - low) * static_cast<float>((*this)() % 65537) / 65536; }
    std::vector<float> floats(int count, float low, float high) {
        std::vector<float> out(static_cast<size_t>(count));
        for (auto& value : out) value = uniform(low, high);
        return out;
    }
};

// 64-byte aligned bytes.
class Bytes {
  public:
    explicit Bytes(size_t size) : memory_(size + 64, 0xa5) {}
    uint8_t* data() {
        const auto address = reinterpret_cast<uintptr_t>(memory_.data());
        return memory_.data() + (64 - address % 64) % 64;
    }

  private:
    std::vector<uint8_t> memory_;
};

inline bool is_same(float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); }

inline bool are_near(const std::vector<float>& a, const std::vector<float>& b, float tolerance) {
    for (size_t i = 0; i < a.size(); i++)
        if (!(std::fabs(a[i] - b[i]) <= tolerance * (1 + std::fabs(b[i]))) && !is_same(a[i], b[i])) return false;
    return a.size() == b.size();
}

class Counts {
  public:
    explicit Counts(const char* isa) : isa_(isa) {}
    // `what` and a number that tells cases apart.
    void add(bool good, const char* subject, const char* what, int number) {
        checks_++;
        if (good) return;
        failures_++;
        std::printf("FAIL %s %s %s %d\n", isa_, subject, what, number);
    }
    void report(const char* subject) const {
        std::printf("%s %s: %ld checks, %ld failures so far\n", isa_, subject, checks_, failures_);
    }
    bool has_failures() const { return failures_ > 0; }

  private:
    const char* isa_;
    long checks_ = 0, failures_ = 0;
};

// Each checks `table` against the generic kernels; `is_wanted` says which weight types.
void check_linear(const pelton::KernelTable& table, const pelton::KernelTable& plain, Counts& counts,
                  bool (*is_wanted)(const char* type));
void check_rows(const pelton::KernelTable& table, const pelton::KernelTable& plain, Counts& counts);
void check_attention(const pelton::KernelTable& table, const pelton::KernelTable& plain, Counts& counts);
void check_limits(const pelton::KernelTable& table, const pelton::KernelTable& plain, Counts& counts);
void check_sample(const pelton::KernelTable& table, const pelton::KernelTable& plain, Counts& counts);

}  // namespace selftest
