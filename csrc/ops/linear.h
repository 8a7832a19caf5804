// linear.h: linears side by side over one set of rows, their tiles spread over the threads.
#pragma once

#include <vector>

#include "context.h"
#include "kernels/rows.h"

namespace pelton {

// A packed weight: N rows of K columns in tiles of 16 rows.
struct Matrix {
    const LinearKernel* kernel = nullptr;
    const uint8_t* tiles = nullptr;
    int N = 0;
    int K = 0;
    size_t tile_bytes = 0;

    int num_tiles() const { return (N + kTileRows - 1) / kTileRows; }
};

// x @ weight.T + bias, x in the prepared form of the weight's family.
struct Product {
    Matrix weight;
    const uint8_t* x = nullptr;
    const float* bias = nullptr;
};

// What becomes of the products: out = product | residual + product | act(product) | act(product) * up |
// cap * tanh(product / cap).
struct Linear {
    enum class Epilogue { Plain, Add, Act, Glu, Softcap };
    Epilogue epilogue = Epilogue::Plain;
    Product product;
    Product up;
    Activation activation = Activation::Silu;
    float cap = 0.0f;
    Rows residual;
    Rows out;
};

// Runs all of them over M rows and returns when all is done. An element's value depends on nothing but its row of x
// and of the weight.
void run_linears(const StepContext& context, const std::vector<Linear>& linears, int M);

}  // namespace pelton
