// dot.h: exact integer dot products of packed weights with int8 activations, kLanes rows of a tile at a time.
//
// Bytes hold kLanes rows x 4 columns. What each instruction set's own header must offer:
//   load_bytes, and_mask, shift<kBits>          planes to values
//   dot<kSafe>(w, x)                            32 columns of unsigned weights
//   Scale, scale_of, dot<kSafe>(w, x, scale..)  the same times an integer scale for the block or each half of it
//   Pairs, pairs, dot_halves                    integer scales times the sums of x over each half
//   SignedBytes, load_signed, dot(w, x, sum)    32 columns of signed weights
//   Table, look_up                              signed weights from codes of four bits
//   dot(w, x, sum, scale)                       signed weights times an integer scale for the block
//   load_u8, load_s8, load_half, load_bf16, to_float, fused: as the names say; fused is a * b + c rounded once
#pragma once

#include "kernels/portable/simd.h"
#include "types.h"

#if defined(__AVX512VNNI__)
#include "kernels/avx512/dot.h"
#elif defined(__AVX2__)
#include "kernels/avx2/dot.h"
#else
#include "kernels/generic/dot.h"
#endif
