// KV memory, and attention alone for its tests. nanobind only; no logic.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <stdexcept>

#include "bindings.h"
#include "machine.h"
#include "ops/attention.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pelton {
namespace {

template <class T, int N>
using Array = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
using Floats = Array<const float, 2>;
using Ints = Array<const int32_t, 1>;

KVType kv_type(const std::string& name) {
    if (name == "f32") return KVType::F32;
    if (name == "bf16") return KVType::BF16;
    if (name == "f16") return KVType::F16;
    if (name == "int8") return KVType::Int8;
    throw std::invalid_argument("KV type is f32, bf16, f16 or int8, not " + name);
}

KVShape kv_shape(int num_layers, int num_kv_heads, int head_dim, int value_dim, const std::string& type) {
    if (head_dim % 2 != 0) throw std::invalid_argument("head_dim must be even");
    return {num_layers, num_kv_heads, head_dim, value_dim, kv_type(type)};
}

Rows rows_of(const Floats& array) {
    return {const_cast<float*>(array.data()), static_cast<int>(array.shape(1)), static_cast<int>(array.shape(1))};
}

// Attention on its own, in the cache's layer `slot` and, where it is repeated, in the next ones, the first after the
// last. `tables` is [S, max blocks].
void attend_alone(Machine& machine, KVCache& cache, int slot, Floats q, Floats k, Floats v, Array<float, 2> out,
                  Ints positions, Ints seq_starts, Array<const int32_t, 2> tables, int num_heads, float scale,
                  int window, float softcap, int repeat) {
    BatchView batch;
    batch.num_tokens = static_cast<int>(q.shape(0));
    batch.num_sequences = static_cast<int>(seq_starts.shape(0)) - 1;
    batch.positions = positions.data();
    batch.seq_starts = seq_starts.data();
    const int32_t* table = tables.data();
    const int32_t width = static_cast<int32_t>(tables.shape(1));
    batch.tables = &table;
    batch.table_widths = &width;
    nb::gil_scoped_release release;
    KVCache* caches = &cache;
    const int num_threads = machine.pool.size();
    const Memory scratch(kScratchBytes * static_cast<size_t>(num_threads));
    const Memory workspace(attend_workspace(cache.shape(), num_heads, width * kBlockTokens, num_threads));
    const StepContext step{machine.pool, machine.kernels, batch, &caches, scratch.data(), workspace.data()};
    const Rows result{out.data(), static_cast<int>(out.shape(1)), static_cast<int>(out.shape(1))};
    AttendArgs args{rows_of(q), rows_of(k), rows_of(v), result, 0, slot, num_heads, scale, window, softcap};
    for (int i = 0; i < repeat; i++) {
        attend(step, args);
        args.slot = (args.slot + 1) % cache.shape().num_layers;
    }
}

}  // namespace

void bind_attention(nb::module_& m) {
    nb::class_<KVCache>(m, "KVCache")
        .def(
            "__init__",
            [](KVCache* self, int num_layers, int num_kv_heads, int head_dim, int value_dim, const std::string& type,
               int num_blocks) {
                new (self) KVCache(kv_shape(num_layers, num_kv_heads, head_dim, value_dim, type), num_blocks);
            },
            nb::kw_only(), "num_layers"_a, "num_kv_heads"_a, "head_dim"_a, "value_dim"_a, "type"_a, "num_blocks"_a)
        .def_prop_ro("block_bytes", [](const KVCache& self) { return self.shape().block_bytes(); })
        .def("copy", &KVCache::copy, "src"_a, "dst"_a, nb::call_guard<nb::gil_scoped_release>())
        .def(
            "read",
            [](const KVCache& self, Ints blocks) {
                const size_t size = blocks.shape(0) * self.shape().block_bytes();
                nb::bytes out = nb::steal<nb::bytes>(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size)));
                self.read(blocks.data(), static_cast<int>(blocks.shape(0)),
                          reinterpret_cast<uint8_t*>(PyBytes_AsString(out.ptr())));
                return out;
            },
            "blocks"_a)
        .def(
            "write",
            [](KVCache& self, Ints blocks, nb::bytes data) {
                if (data.size() != blocks.shape(0) * self.shape().block_bytes()) {
                    throw std::invalid_argument("these bytes are not of that many blocks");
                }
                self.write(blocks.data(), static_cast<int>(blocks.shape(0)), static_cast<const uint8_t*>(data.data()));
            },
            "blocks"_a, "data"_a);
    m.def(
        "kv_block_bytes",
        [](int num_layers, int num_kv_heads, int head_dim, int value_dim, const std::string& type) {
            return kv_shape(num_layers, num_kv_heads, head_dim, value_dim, type).block_bytes();
        },
        nb::kw_only(), "num_layers"_a, "num_kv_heads"_a, "head_dim"_a, "value_dim"_a, "type"_a);
    m.def(
        "attend_workspace",
        [](int num_kv_heads, int head_dim, int value_dim, const std::string& type, int num_heads, int max_context,
           int num_threads) {
            const KVShape shape = kv_shape(1, num_kv_heads, head_dim, value_dim, type);
            return attend_workspace(shape, num_heads, max_context, num_threads);
        },
        nb::kw_only(), "num_kv_heads"_a, "head_dim"_a, "value_dim"_a, "type"_a, "num_heads"_a, "max_context"_a,
        "num_threads"_a);
    m.def("attend_alone", &attend_alone, nb::kw_only(), "machine"_a, "cache"_a, "slot"_a, "q"_a, "k"_a, "v"_a, "out"_a,
          "positions"_a, "seq_starts"_a, "tables"_a, "num_heads"_a, "scale"_a, "window"_a = 0, "softcap"_a = 0.0f,
          "repeat"_a = 1);
}

}  // namespace pelton
