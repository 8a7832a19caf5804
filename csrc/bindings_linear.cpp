// bindings_linear.cpp: one linear kernel on NumPy arrays, for tests and measurements.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings.h"
#include "kernels/table.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pelton {
namespace {

constexpr size_t kAlignment = size_t{2} << 20;  // of huge pages

template <class T, class... Shape>
using Array = nb::ndarray<nb::numpy, T, Shape...>;
using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ByteRows = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using FloatRows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using OutRows = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void* allocate(size_t bytes) {
    void* p = std::aligned_alloc(kAlignment, (bytes + kAlignment) / kAlignment * kAlignment);
    if (!p) throw std::bad_alloc();
    return p;
}

template <class T>
Array<T> own(T* data, std::initializer_list<size_t> shape) {
    return Array<T>(data, shape, nb::capsule(data, [](void* p) noexcept { std::free(p); }));
}

int num_tiles(size_t rows) { return (int)((rows + kTileRows - 1) / kTileRows); }

class LinearBinding {
  public:
    LinearBinding(const std::string& isa, int type) : table_(find_kernels(isa.c_str())) {
        if (!table_) throw nb::value_error(("this CPU or build has no instruction set " + isa).c_str());
        kernel_ = table_->linear.linear((WeightType)type);
        if (!kernel_) throw nb::value_error(("no linear kernel for weight type " + std::to_string(type)).c_str());
    }

    int family() const { return (int)kernel_->family; }
    size_t tile_bytes(int K) const { return kernel_->tile_bytes(K); }

    Array<uint8_t> pack(ByteRows rows, int K) const {
        const int tiles = num_tiles(rows.shape(0));
        const size_t bytes = (size_t)tiles * kernel_->tile_bytes(K);
        uint8_t* out = (uint8_t*)allocate(bytes);
        nb::gil_scoped_release release;
        for (int t = 0; t < tiles; t++) {
            const uint8_t* pointers[kTileRows];
            int count = 0;
            for (size_t r = (size_t)t * kTileRows; r < rows.shape(0) && count < kTileRows; r++)
                pointers[count++] = rows.data() + r * rows.shape(1);
            kernel_->pack(pointers, count, K, out + (size_t)t * kernel_->tile_bytes(K));
        }
        nb::gil_scoped_acquire acquire;
        return own(out, {bytes});
    }

    Array<uint8_t> prepare(FloatRows x) const {
        const ActivationKernel& kernel = table_->linear.activations[(int)kernel_->family];
        const int M = (int)x.shape(0), K = (int)x.shape(1);
        const size_t bytes = kernel.bytes(M, K);
        uint8_t* act = (uint8_t*)allocate(bytes);
        kernel.prepare(x.data(), x.shape(1), 0, M, M, K, act);
        return own(act, {bytes});
    }

    void run(Bytes tiles, Bytes act, int K, OutRows out, int t0, int t1) const {
        nb::gil_scoped_release release;
        thread_local uint8_t* scratch = (uint8_t*)allocate(kScratchBytes);
        kernel_->run(tiles.data(), act.data(), (int)out.shape(0), K, out.data(), out.shape(1), t0, t1, scratch);
    }

    Array<float> unpack_row(Bytes tiles, int row, int K) const {
        float* out = (float*)allocate((size_t)K * sizeof(float));
        kernel_->unpack_row(tiles.data() + (size_t)(row / kTileRows) * kernel_->tile_bytes(K), row % kTileRows, K, out);
        return own(out, {(size_t)K});
    }

  private:
    const KernelTable* table_;
    const LinearKernel* kernel_;
};

class LimitsBinding {
  public:
    explicit LimitsBinding(const std::string& isa) : table_(find_kernels(isa.c_str())) {
        if (!table_) throw nb::value_error(("this CPU or build has no instruction set " + isa).c_str());
    }
    uint32_t read(Bytes data) const {
        nb::gil_scoped_release release;
        return table_->limits->read(data.data(), data.shape(0) / 256 * 256);
    }
    int32_t int8_dots(int num_dots) const {
        nb::gil_scoped_release release;
        return table_->limits->int8_dots(num_dots);
    }
    float float_products(int num_columns) const {
        nb::gil_scoped_release release;
        return table_->limits->float_products(num_columns);
    }
    bool has_tiles() const { return table_->bf16_products; }
    float bf16_products(int num_steps) const {
        if (!has_tiles()) throw nb::value_error("this instruction set has no tiles");
        nb::gil_scoped_release release;
        return table_->bf16_products(num_steps);
    }

  private:
    const KernelTable* table_;
};

}  // namespace

void bind_linear(nb::module_& m) {
    nb::class_<LimitsBinding>(m, "Limits")
        .def(nb::init<const std::string&>(), "isa"_a)
        .def("read", &LimitsBinding::read, "data"_a)
        .def("int8_dots", &LimitsBinding::int8_dots, "num_dots"_a)
        .def("float_products", &LimitsBinding::float_products, "num_columns"_a)
        .def_prop_ro("has_tiles", &LimitsBinding::has_tiles)
        .def("bf16_products", &LimitsBinding::bf16_products, "num_steps"_a);
    nb::class_<LinearBinding>(m, "LinearKernel")
        .def(nb::init<const std::string&, int>(), "isa"_a, "type"_a)
        .def_prop_ro("family", &LinearBinding::family)
        .def("tile_bytes", &LinearBinding::tile_bytes, "K"_a)
        .def("pack", &LinearBinding::pack, "rows"_a, "K"_a)
        .def("prepare", &LinearBinding::prepare, "x"_a)
        .def("run", &LinearBinding::run, "tiles"_a, "act"_a, "K"_a, "out"_a, "t0"_a, "t1"_a)
        .def("unpack_row", &LinearBinding::unpack_row, "tiles"_a, "row"_a, "K"_a);
}

}  // namespace pelton
