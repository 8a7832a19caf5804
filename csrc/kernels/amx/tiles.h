// tiles.h: the tile registers, and one step of a tile product.
//
// A step multiplies 16 rows of activations by 16 rows of weights over 32 columns (TDPBF16PS). Its arithmetic, for
// each output (Intel SDM volume 2): two float32 sums from zero, one over the even and one over the odd columns,
// ascending, each addend one exact product of two bf16 values, each sum rounded to nearest even; then the two sums are
// added, and the result is added to the accumulator. Subnormal inputs and results count as zero.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pelton::amx {

constexpr int kStepColumns = 32;
constexpr int kRows = 16;                            // rows of a whole tile, of activations and of weights
constexpr int kTileElements = kRows * kStepColumns;  // bf16 values of one operand tile
constexpr int kTileBytes = kTileElements * 2;        // also the bytes of 16 x 16 float32 sums
constexpr int kRowBytes = 64;                        // of every tile

// Which register holds what: sums of row tile r and column tile c, activations of row tile r, weights of column tile c.
constexpr int sum_register(int r, int c) { return 2 * r + c; }
constexpr int row_register(int r) { return 4 + r; }
constexpr int column_register(int c) { return 6 + c; }

// Configures the tile registers for as long as it lives: the two row tiles have rows0 and rows1 (1..16) rows.
class TileRegisters {
  public:
    TileRegisters(int rows0, int rows1) {
        alignas(64) Config config = {};
        config.palette = 1;
        const int rows[8] = {rows0, rows0, rows1, rows1, rows0, rows1, kRows, kRows};
        for (int i = 0; i < 8; i++) {
            config.rows[i] = static_cast<uint8_t>(rows[i]);
            config.row_bytes[i] = kRowBytes;
        }
        asm volatile("ldtilecfg %0" ::"m"(config) : "memory");
    }
    ~TileRegisters() { asm volatile("tilerelease" ::: "memory"); }
    TileRegisters(const TileRegisters&) = delete;
    TileRegisters& operator=(const TileRegisters&) = delete;

  private:
    struct Config {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    };
    static_assert(sizeof(Config) == 64);
};

// The compiler knows nothing of tile registers: "memory" keeps stores to operands before the loads of them.
// `stride`: bytes from one row to the next.
template <int kRegister>
inline void load_tile(const void* from, size_t stride = kRowBytes) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kRegister) : "memory");
}
template <int kRegister>
inline void store_tile(void* to, size_t stride = kRowBytes) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(kRegister) : "memory");
}
template <int kRegister>
inline void zero_tile() {
    asm volatile("tilezero %%tmm%c0" ::"i"(kRegister));
}
template <int kSum, int kRow, int kColumn>
inline void multiply_tiles() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kRow), "i"(kColumn));
}

// The sums of kRowTiles x kColumnTiles products, between registers and 1 KiB of memory each (sum_register order).
template <int kRowTiles, int kColumnTiles>
struct Sums {
    static void zero() {
        zero_tile<sum_register(0, 0)>();
        if constexpr (kColumnTiles == 2) zero_tile<sum_register(0, 1)>();
        if constexpr (kRowTiles == 2) zero_tile<sum_register(1, 0)>();
        if constexpr (kRowTiles == 2 && kColumnTiles == 2) zero_tile<sum_register(1, 1)>();
    }
    static void load(const float* from) {
        load_tile<sum_register(0, 0)>(from);
        if constexpr (kColumnTiles == 2) load_tile<sum_register(0, 1)>(from + 256);
        if constexpr (kRowTiles == 2) load_tile<sum_register(1, 0)>(from + 512);
        if constexpr (kRowTiles == 2 && kColumnTiles == 2) load_tile<sum_register(1, 1)>(from + 768);
    }
    static void store(float* to) {
        store_tile<sum_register(0, 0)>(to);
        if constexpr (kColumnTiles == 2) store_tile<sum_register(0, 1)>(to + 256);
        if constexpr (kRowTiles == 2) store_tile<sum_register(1, 0)>(to + 512);
        if constexpr (kRowTiles == 2 && kColumnTiles == 2) store_tile<sum_register(1, 1)>(to + 768);
    }
    // Into a row-major matrix, `stride` floats from one row to the next.
    static void store_rows(float* to, size_t stride) {
        const size_t bytes = stride * sizeof(float), row_tile = kRows * stride;
        store_tile<sum_register(0, 0)>(to, bytes);
        if constexpr (kColumnTiles == 2) store_tile<sum_register(0, 1)>(to + kRows, bytes);
        if constexpr (kRowTiles == 2) store_tile<sum_register(1, 0)>(to + row_tile, bytes);
        if constexpr (kRowTiles == 2 && kColumnTiles == 2) store_tile<sum_register(1, 1)>(to + row_tile + kRows, bytes);
    }
    // One step: rows[r] and columns[c] point at operand tiles, those of rows with `stride` bytes from one row to the
    // next. `then(c)` runs after the products of column tile c.
    template <class Then>
    [[gnu::always_inline]] static void add_step(const uint8_t* const* rows, const uint16_t* const* columns,
                                                const Then& then, size_t stride = kRowBytes) {
        load_tile<row_register(0)>(rows[0], stride);
        load_tile<column_register(0)>(columns[0]);
        multiply_tiles<sum_register(0, 0), row_register(0), column_register(0)>();
        if constexpr (kRowTiles == 2) {
            load_tile<row_register(1)>(rows[1], stride);
            multiply_tiles<sum_register(1, 0), row_register(1), column_register(0)>();
        }
        then(0);
        if constexpr (kColumnTiles == 2) {
            load_tile<column_register(1)>(columns[1]);
            multiply_tiles<sum_register(0, 1), row_register(0), column_register(1)>();
            if constexpr (kRowTiles == 2) multiply_tiles<sum_register(1, 1), row_register(1), column_register(1)>();
            then(1);
        }
    }
};

}  // namespace pelton::amx
