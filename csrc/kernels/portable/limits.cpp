// The inner loops of the kernels with everything else taken away.
#include "kernels/limits.h"

#include "kernels/portable/dot.h"

namespace pelton::PELTON_ISA {
namespace {

uint32_t read(const uint8_t* data, size_t bytes) {
    constexpr size_t kStride = 256, kAhead = 2048;
    constexpr int kVectors = kStride / sizeof(VecI);
    VecI sum[kVectors] = {};
    for (size_t i = 0; i < bytes; i += kStride) {
        for (size_t z = 0; z < kStride; z += 64) __builtin_prefetch(data + i + kAhead + z);
        for (int v = 0; v < kVectors; v++) sum[v] ^= load<VecI>(data + i + (size_t)v * sizeof(VecI));
    }
    uint32_t total = 0;
    for (int v = 0; v < kVectors; v++)
        for (int lane = 0; lane < kLanes; lane++) total ^= (uint32_t)sum[v][lane];
    return total;
}

constexpr int kRows = 64;  // of activations: 2 KiB

int32_t int8_dots(int num_dots) {
    alignas(64) uint8_t weights[8 * 64];
    alignas(64) int8_t x[kRows * 32];
    for (int i = 0; i < 8 * 64; i++) weights[i] = (uint8_t)(i * 7 & 15);
    for (int i = 0; i < kRows * 32; i++) x[i] = (int8_t)(i * 37);
    VecI total{};
    for (int done = 0; done < num_dots; done += kRows)
        for (int part = 0; part < kParts; part++) {
            Bytes w[8];
            for (int g = 0; g < 8; g++) w[g] = load_bytes(weights + 64 * g + part * kLanes * 4);
            for (int m = 0; m < kRows; m++) total += dot<8>(w, x + 32 * m);
        }
    return total[0];
}

float float_products(int num_columns) {
    VecF sum[4][kParts] = {}, weight[kParts];
    for (int p = 0; p < kParts; p++) weight[p] = splat(1.0f + 0x1p-20f * (float)p);
    for (int k = 0; k < num_columns; k++)
        for (int m = 0; m < 4; m++) {
            for (int p = 0; p < kParts; p++) sum[m][p] = fused(sum[m][p], weight[p], weight[p]);
            if constexpr (kParts == 1) asm volatile("" : "+x"(sum[m][0]));  // keep the compiler from joining columns
        }
    float total = 0;
    for (int m = 0; m < 4; m++)
        for (int p = 0; p < kParts; p++) total += sum[m][p][0];
    return total;
}

}  // namespace

const LimitKernels limit_kernels = {read, int8_dots, float_products};

}  // namespace pelton::PELTON_ISA
