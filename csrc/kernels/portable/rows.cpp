// rows.cpp: the row ops of rows.h, one source for every instruction set.
#include "kernels/rows.h"

#include "kernels/portable/math.h"

namespace pelton::PELTON_ISA {
namespace {

// The first n values of a vector, zeros behind; and back.
PELTON_INLINE VecF load_some(const float* from, int n) {
    VecF value = {};
    __builtin_memcpy(&value, from, static_cast<size_t>(n) * sizeof(float));
    return value;
}

PELTON_INLINE void store_some(float* to, VecF value, int n) {
    __builtin_memcpy(to, &value, static_cast<size_t>(n) * sizeof(float));
}

// out[i] = f(x[i], y[i]...) over whole vectors and the tail, which goes through the same arithmetic.
template <class F, class... Inputs>
PELTON_INLINE void map(int n, float* out, F f, const Inputs*... inputs) {
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) store(out + i, f(load(inputs + i)...));
    if (i < n) store_some(out + i, f(load_some(inputs + i, n - i)...), n - i);
}

// The sum of f over x: value i goes to lane i % 16.
template <class F>
PELTON_INLINE float reduce(int n, F f, const float* x) {
    VecF total[kParts] = {};
    int i = 0;
    for (; i + kGroup <= n; i += kGroup) {
        for (int part = 0; part < kParts; part++) total[part] += f(load(x + i + part * kLanes));
    }
    for (int part = 0; i < n; part++, i += kLanes) {
        const int count = n - i < kLanes ? n - i : kLanes;
        const VecF value = f(load_some(x + i, count));
        total[part] += load_some(reinterpret_cast<const float*>(&value), count);
    }
    return sum_group(total);
}

PELTON_INLINE VecF sigmoid(VecF x) { return 1.0f / (1.0f + exp(-x)); }

// erfc by the fit of Numerical Recipes (section 6.2), fractional error below 1.2e-7; gelu(x) = x * Phi(x).
PELTON_INLINE VecF gelu(VecF x) {
    static constexpr float kFit[] = {0.17087277f,  -0.82215223f, 1.48851587f, -1.13520398f, 0.27886807f,
                                     -0.18628806f, 0.09678418f,  0.37409196f, 1.00002368f,  -1.26551223f};
    const VecF z = abs(x) * 0.70710678f, t = 1.0f / (1.0f + z * 0.5f);
    VecF p = {};
    for (float c : kFit) p = p * t + c;
    const VecF tail = t * exp(p - z * z) * 0.5f;  // Phi(-|x|)
    return x * (x < 0.0f ? tail : 1.0f - tail);
}

// max(x, 0) + log(1 + e^-|x|), the logarithm as 2 atanh(y / (2 + y)).
PELTON_INLINE VecF softplus(VecF x) {
    const VecF y = exp(-abs(x)), s = y / (2.0f + y), ss = s * s;
    VecF p = splat(2.0f / 15.0f);
    for (float odd = 13.0f; odd > 0.0f; odd -= 2.0f) p = p * ss + 2.0f / odd;
    return max(x, VecF{}) + p * s;
}

// x/2 (1 + tanh u) = x sigmoid(2u), which stays accurate where 1 + tanh u would cancel.
PELTON_INLINE VecF gelu_tanh(VecF x) {
    const VecF inner = (x + x * x * x * 0.044715f) * 0.7978845608f;
    return x * sigmoid(inner + inner);
}

template <class Use>
PELTON_INLINE void with_activation(Activation kind, Use use) {
    switch (kind) {
        case Activation::Silu:
            return use([](VecF x) { return x * sigmoid(x); });
        case Activation::GeluTanh:
            return use([](VecF x) { return gelu_tanh(x); });
        case Activation::Gelu:
            return use([](VecF x) { return gelu(x); });
        case Activation::Relu:
            return use([](VecF x) { return max(x, VecF{}); });
        case Activation::Sigmoid:
            return use([](VecF x) { return sigmoid(x); });
        case Activation::Softplus:
            return use([](VecF x) { return softplus(x); });
    }
}

void rms_norm(const float* x, const float* weight, int width, int groups, float eps, float* out) {
    for (int g = 0; g < groups; g++, x += width, out += width) {
        const float mean = reduce(width, [](VecF v) { return v * v; }, x) / static_cast<float>(width);
        const float inverse = 1.0f / __builtin_sqrtf(mean + eps);
        if (weight) {
            map(width, out, [=](VecF v, VecF w) { return v * inverse * w; }, x, weight);
        } else {
            map(width, out, [=](VecF v) { return v * inverse; }, x);
        }
    }
}

void layer_norm(const float* x, const float* weight, const float* bias, int width, float eps, float* out) {
    const float count = static_cast<float>(width);
    const float mean = reduce(width, [](VecF v) { return v; }, x) / count;
    const float variance = reduce(width, [=](VecF v) { return (v - mean) * (v - mean); }, x) / count;
    const float inverse = 1.0f / __builtin_sqrtf(variance + eps);
    map(width, out, [=](VecF v, VecF w) { return (v - mean) * inverse * w; }, x, weight);
    if (bias) map(width, out, [](VecF v, VecF b) { return v + b; }, static_cast<const float*>(out), bias);
}

void rope(const float* x, const float* angles, int num_heads, int head_dim, int dim, float* out) {
    const int half = dim / 2;
    const float *cos = angles, *sin = angles + half;
    for (int h = 0; h < num_heads; h++, x += head_dim, out += head_dim) {
        map(half, out, [](VecF a, VecF b, VecF c, VecF s) { return a * c - b * s; }, x, x + half, cos, sin);
        map(half, out + half, [](VecF a, VecF b, VecF c, VecF s) { return b * c + a * s; }, x, x + half, cos, sin);
        __builtin_memcpy(out + dim, x + dim, static_cast<size_t>(head_dim - dim) * sizeof(float));
    }
}

void add(const float* x, const float* y, int n, float* out) {
    map(n, out, [](VecF a, VecF b) { return a + b; }, x, y);
}

void mul(const float* x, const float* y, int n, float* out) {
    map(n, out, [](VecF a, VecF b) { return a * b; }, x, y);
}

void scale(const float* x, float factor, int n, float* out) {
    map(n, out, [=](VecF a) { return a * factor; }, x);
}

void act(Activation kind, const float* x, int n, float* out) {
    with_activation(kind, [=](auto f) { map(n, out, f, x); });
}

void glu(Activation kind, const float* gate, const float* up, int n, float* out) {
    with_activation(kind, [=](auto f) { map(n, out, [=](VecF g, VecF u) { return f(g) * u; }, gate, up); });
}

void softcap(const float* x, float cap, int n, float* out) {
    map(n, out, [=](VecF v) { return tanh(v / cap) * cap; }, x);
}

}  // namespace

extern const RowKernels row_kernels = {rms_norm, layer_norm, rope, add, mul, scale, act, glu, softcap};

}  // namespace pelton::PELTON_ISA
