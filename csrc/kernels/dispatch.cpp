// Which instruction sets this CPU has: asked once, with cpuid and xgetbv.
#include <cstring>

#include "kernels/table.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace pelton {

#if defined(__x86_64__)
namespace {

struct CpuFeatures {
    bool avx2 = false, avx512 = false, amx = false;
};

// The operating system must save the registers too: bits of xcr0 (Intel SDM volume 1, chapter 13).
uint64_t enabled_state() {
    uint32_t low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t{high} << 32) | low;
}

// Linux hands out the tile registers only to a process that asks (arch_prctl ARCH_REQ_XCOMP_PERM, 18 = tile data).
bool request_tiles() { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

CpuFeatures ask_cpu() {
    CpuFeatures features;
    uint32_t a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return features;
    const bool osxsave = c & (1u << 27), fma = c & (1u << 12), f16c = c & (1u << 29);
    if (!osxsave) return features;
    const uint64_t state = enabled_state();
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return features;
    const bool ymm = (state & 0x6) == 0x6, zmm = (state & 0xe6) == 0xe6, tiles = (state & 0x60000) == 0x60000;
    features.avx2 = ymm && fma && f16c && (b & (1u << 5)) && (b & (1u << 8));
    const uint32_t f_dq_bw_vl = (1u << 16) | (1u << 17) | (1u << 30) | (1u << 31);
    features.avx512 = features.avx2 && zmm && (b & f_dq_bw_vl) == f_dq_bw_vl && (c & (1u << 11));
    const bool has_vbmi = (c & (1u << 1)) && (c & (1u << 6)), has_fp16 = d & (1u << 23);  // VBMI and VBMI2
    const bool has_tiles = (d & (1u << 22)) && (d & (1u << 24));                          // AMX-BF16, AMX-TILE
    if (!__get_cpuid_count(7, 1, &a, &b, &c, &d)) return features;
    const bool has_bf16 = a & (1u << 5);  // AVX512_BF16
    features.amx = features.avx512 && tiles && has_vbmi && has_fp16 && has_tiles && has_bf16 && request_tiles();
    return features;
}

const CpuFeatures& cpu() {
    static const CpuFeatures features = ask_cpu();
    return features;
}

}  // namespace
#endif

int available_isas(const char* names[kMaxIsas]) {
    int count = 0;
    names[count++] = "generic";
#if defined(__x86_64__)
    if (cpu().avx2) names[count++] = "avx2";
    if (cpu().avx512) names[count++] = "avx512";
    if (cpu().amx) names[count++] = "amx";
#endif
    return count;
}

const KernelTable* find_kernels(const char* isa) {
    const char* names[kMaxIsas];
    const int count = available_isas(names);
    const char* wanted = *isa ? isa : names[count - 1];
    for (int i = 0; i < count; i++) {
        if (std::strcmp(names[i], wanted) != 0) continue;
#if defined(__x86_64__)
        if (!std::strcmp(wanted, "avx2")) return avx2::kernel_table();
        if (!std::strcmp(wanted, "avx512")) return avx512::kernel_table();
        if (!std::strcmp(wanted, "amx")) return amx::kernel_table();
#endif
        return generic::kernel_table();
    }
    return nullptr;
}

}  // namespace pelton
