// bindings_plan.cpp: machine, memory and program as Python sees them; no logic. Long calls release the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <tuple>

#include "bindings.h"
#include "bindings_sample.h"
#include "plan.h"
#include "stored.h"

namespace nb = nanobind;

namespace pelton {
namespace {

template <class T, int Dims>
using Array = nb::ndarray<const T, nb::ndim<Dims>, nb::c_contig, nb::device::cpu>;
using Ids = std::tuple<int, int, int>;

Program::ProductIds product_ids(const Ids& ids) { return {std::get<0>(ids), std::get<1>(ids), std::get<2>(ids)}; }

const LinearKernel& linear_of(const Machine& machine, int type) {
    const LinearKernel* kernel = machine.linear(static_cast<WeightType>(type));
    if (!kernel) throw std::invalid_argument("no kernel for this weight type");
    return *kernel;
}

void bind_machine(nb::module_& m) {
    nb::class_<Memory>(m, "Memory")
        .def(nb::init<size_t>(), nb::arg("bytes"))
        .def_prop_ro("size", &Memory::size)
        .def(
            "write",
            [](Memory& memory, size_t offset, Array<uint8_t, 1> bytes) {
                if (offset + bytes.size() > memory.size()) throw std::out_of_range("beyond the memory");
                std::memcpy(memory.data() + offset, bytes.data(), bytes.size());
            },
            nb::arg("offset"), nb::arg("bytes"))
        .def(
            "view",
            [](nb::object self, size_t offset, size_t bytes) {
                const Memory& memory = nb::cast<const Memory&>(self);
                if (offset + bytes > memory.size()) throw std::out_of_range("beyond the memory");
                return nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>>(memory.data() + offset, {bytes}, self);
            },
            nb::arg("offset"), nb::arg("bytes"));
    m.attr("STORED_CHUNK") = kStoredChunk;
    m.def(
        "checksum",
        [](Array<uint8_t, 1> data) {
            nb::gil_scoped_release unlocked;
            return checksum(data.data(), data.size());
        },
        nb::arg("data"));
    nb::class_<Machine>(m, "Machine")
        .def(nb::init<const std::string&, int>(), nb::arg("isa"), nb::arg("num_threads"))
        .def_prop_ro("isa", [](const Machine& machine) { return machine.kernels.isa; })
        .def_prop_ro("num_threads", [](const Machine& machine) { return machine.pool.size(); })
        .def(
            "family",
            [](const Machine& machine, int type) {
                const LinearKernel* kernel = machine.linear(static_cast<WeightType>(type));
                return kernel ? static_cast<int>(kernel->family) : -1;
            },
            nb::arg("type"))
        .def(
            "tile_bytes",
            [](const Machine& machine, int type, int K) { return linear_of(machine, type).tile_bytes(K); },
            nb::arg("type"), nb::arg("K"))
        .def(
            "prepared_bytes",
            [](const Machine& machine, int family, int M, int K) {
                return machine.kernels.linear.activations[family].bytes(M, K);
            },
            nb::arg("family"), nb::arg("M"), nb::arg("K"))
        .def("scratch_bytes", &Machine::scratch_bytes, nb::arg("max_tokens"))
        .def(
            "hand_out",
            [](Machine& machine, nb::ndarray<int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu> counts, int repeat) {
                int32_t* first = counts.data();
                const size_t stride = counts.shape(1);
                const int num_chunks = static_cast<int>(counts.shape(0));
                nb::gil_scoped_release unlocked;
                for (int i = 0; i < repeat; i++)
                    machine.pool.run(num_chunks, [&](int chunk, int) { first[static_cast<size_t>(chunk) * stride]++; });
            },
            nb::arg("counts"), nb::arg("repeat"))
        .def(
            "meet", [](Machine& machine, int times) { machine.pool.meet(times); }, nb::arg("times"),
            nb::call_guard<nb::gil_scoped_release>())
        .def(
            "pack",
            [](Machine& machine, int type, Array<uint8_t, 1> file, int num_rows, int K,
               std::optional<Array<int32_t, 1>> row_order, Memory& memory, size_t offset) {
                const LinearKernel& kernel = linear_of(machine, type);
                const size_t tiles = static_cast<size_t>((num_rows + kTileRows - 1) / kTileRows);
                if (offset + tiles * kernel.tile_bytes(K) > memory.size()) throw std::out_of_range("beyond the memory");
                const int32_t* order = row_order ? row_order->data() : nullptr;
                const size_t row_bytes = file.size() / static_cast<size_t>(num_rows);
                nb::gil_scoped_release unlocked;
                machine.pack(kernel, file.data(), row_bytes, num_rows, K, order, memory.data() + offset);
            },
            nb::arg("type"), nb::arg("file"), nb::arg("num_rows"), nb::arg("K"), nb::arg("row_order").none(),
            nb::arg("memory"), nb::arg("offset"))
        .def(
            "read_stored",
            [](Machine& machine, int fd, uint64_t file_offset, Memory& memory, size_t offset, size_t bytes,
               Array<uint64_t, 1> checksums) {
                if (offset + bytes > memory.size()) throw std::out_of_range("beyond the memory");
                if (checksums.size() * kStoredChunk < bytes) throw std::out_of_range("too few checksums");
                nb::gil_scoped_release unlocked;
                return read_stored(machine.pool, fd, file_offset, memory.data() + offset, bytes, checksums.data());
            },
            nb::arg("fd"), nb::arg("file_offset"), nb::arg("memory"), nb::arg("offset"), nb::arg("bytes"),
            nb::arg("checksums"));
}

// One step's arrays, which stay where they are for as long as this lives; `ids` and `positions` may be advanced in
// place.
class Step {
  public:
    template <class T, int Dims>
    using Mutable = nb::ndarray<T, nb::ndim<Dims>, nb::c_contig, nb::device::cpu>;

    Step(Mutable<int32_t, 1> ids, Mutable<int32_t, 1> positions, Array<int32_t, 1> seq_starts,
         std::vector<Array<int32_t, 2>> tables, Array<int32_t, 1> logit_rows, int num_pooled)
        : ids_(std::move(ids)),
          positions_(std::move(positions)),
          seq_starts_(std::move(seq_starts)),
          tables_(std::move(tables)),
          logit_rows_(std::move(logit_rows)),
          num_pooled_(num_pooled) {
        for (const auto& table : tables_) {
            table_data_.push_back(table.data());
            table_widths_.push_back(static_cast<int32_t>(table.shape(1)));
        }
    }

    int num_tokens() const { return static_cast<int>(ids_.size()); }

    BatchView view() const {
        BatchView batch;
        batch.num_tokens = num_tokens();
        batch.num_sequences = static_cast<int>(seq_starts_.size()) - 1;
        batch.num_logit_rows = static_cast<int>(logit_rows_.size());
        batch.num_drawn = batch.num_logit_rows - num_pooled_;
        batch.ids = ids_.data();
        batch.positions = positions_.data();
        batch.seq_starts = seq_starts_.data();
        batch.logit_rows = logit_rows_.data();
        batch.tables = table_data_.data();
        batch.table_widths = table_widths_.data();
        return batch;
    }

    int32_t* ids() { return ids_.data(); }
    int32_t* positions() { return positions_.data(); }

  private:
    Mutable<int32_t, 1> ids_, positions_;
    Array<int32_t, 1> seq_starts_;
    std::vector<Array<int32_t, 2>> tables_;
    Array<int32_t, 1> logit_rows_;
    int num_pooled_;
    std::vector<const int32_t*> table_data_;
    std::vector<int32_t> table_widths_;
};

void run(Program& program, const Step& step) {
    const BatchView batch = step.view();
    nb::gil_scoped_release unlocked;
    program.run(batch);
}

void logits(Program& program, nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu> out) {
    const auto width = static_cast<size_t>(program.num_valid());
    nb::gil_scoped_release unlocked;
    program.run_head([&](const StepContext&, int first, int count, const Rows& logits) {
        for (int r = 0; r < count; r++)
            std::memcpy(out.data() + static_cast<size_t>(first + r) * width, logits.row(r), width * sizeof(float));
    });
}

void states(const Program& program, nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu> out) {
    if (out.shape(0) != static_cast<size_t>(program.num_pooled()) ||
        out.shape(1) != static_cast<size_t>(program.width()))
        throw std::invalid_argument("states: out has another shape");
    nb::gil_scoped_release unlocked;
    program.states(out.data());
}

void sample(Program& program, const Drawing& drawing, nb::handle processing) {
    const int num_rows = program.num_drawn();
    if (drawing.num_rows != num_rows) throw std::invalid_argument("a drawing for another number of rows");
    Processing processors(processing, num_rows);
    nb::gil_scoped_release unlocked;
    program.run_head([&](const StepContext& context, int first, int count, const Rows& logits) {
        processors.sample(context, first, count, logits, drawing.params, drawing.result);
    });
}

GoesOn goes_on(Step& step, Drawing& drawing) {
    const BatchView batch = step.view();
    if (batch.num_tokens != drawing.num_rows || batch.num_sequences != drawing.num_rows ||
        batch.num_drawn != drawing.num_rows)
        throw std::invalid_argument("a step that goes on has one token and one drawn one for each sequence");
    return {drawing.num_rows, step.ids(), step.positions(), drawing.positions(), drawing.result};
}

void advance(Step& step, Drawing& drawing) { goes_on(step, drawing).advance(); }

nb::object proceed(Program& program, Step& step, Drawing& drawing, Array<int32_t, 1> ends) {
    const GoesOn next = goes_on(step, drawing);
    bool is_plain = false;
    {
        nb::gil_scoped_release unlocked;
        next.advance();
        program.run(step.view());
        program.run_head([&](const StepContext& context, int first, int count, const Rows& logits) {
            pelton::sample(context, first, count, logits, drawing.params, drawing.result);
        });
        is_plain = next.has_drawn_none_of(ends.data(), static_cast<int>(ends.size()));
    }
    if (!is_plain) return nb::none();
    return nb::bytes(drawing.result.ids, static_cast<size_t>(drawing.num_rows) * sizeof(int32_t));
}

void bind_step(nb::module_& m) {
    nb::class_<Step>(m, "Step")
        .def(nb::init<Step::Mutable<int32_t, 1>, Step::Mutable<int32_t, 1>, Array<int32_t, 1>,
                      std::vector<Array<int32_t, 2>>, Array<int32_t, 1>, int>(),
             nb::arg("ids").noconvert(), nb::arg("positions").noconvert(), nb::arg("seq_starts").noconvert(),
             nb::arg("tables"), nb::arg("logit_rows").noconvert(), nb::arg("num_pooled"))
        .def_prop_ro("num_tokens", &Step::num_tokens);
    nb::class_<Drawing>(m, "Drawing")
        .def(nb::init<nb::object, nb::object, int, int>(), nb::arg("params"), nb::arg("out"), nb::arg("num_rows"),
             nb::arg("vocab_size"));
}

void bind_program(nb::module_& m) {
    nb::class_<Program>(m, "Program")
        .def(
            "__init__",
            [](Program* self, Machine& machine, std::vector<KVCache*> caches, size_t arena, size_t workspace,
               int max_tokens, bool profile) {
                new (self) Program(machine, std::move(caches), {arena, workspace, max_tokens}, profile);
            },
            nb::arg("machine"), nb::arg("caches"), nb::arg("arena"), nb::arg("workspace"), nb::arg("max_tokens"),
            nb::arg("profile"), nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>())
        .def("add_rows", &Program::add_rows, nb::arg("offset"), nb::arg("width"), nb::arg("stride"))
        .def(
            "add_prepared",
            [](Program& self, size_t offset, int width, int family) {
                return self.add_prepared(offset, width, static_cast<Family>(family));
            },
            nb::arg("offset"), nb::arg("width"), nb::arg("family"))
        .def(
            "add_vector",
            [](Program& self, const Memory& weights, size_t offset, int width) {
                return self.add_vector(reinterpret_cast<const float*>(weights.data() + offset), width);
            },
            nb::arg("weights"), nb::arg("offset"), nb::arg("width"), nb::keep_alive<1, 2>())
        .def(
            "add_matrix",
            [](Program& self, int type, const Memory& weights, size_t offset, int N, int K) {
                return self.add_matrix(static_cast<WeightType>(type), weights.data() + offset, N, K);
            },
            nb::arg("type"), nb::arg("weights"), nb::arg("offset"), nb::arg("N"), nb::arg("K"), nb::keep_alive<1, 3>())
        .def("begin_rows", &Program::begin_rows, nb::arg("per_logit_row"))
        .def("begin_linears", &Program::begin_linears, nb::arg("per_logit_row"))
        .def("add_row_step", &Program::add_row_step, nb::arg("op"), nb::arg("outs"), nb::arg("ins"), nb::arg("ints"),
             nb::arg("floats"))
        .def(
            "add_linear",
            [](Program& self, int epilogue, int out, const Ids& product, const Ids& up, int residual, int activation) {
                self.add_linear(static_cast<Linear::Epilogue>(epilogue), out, product_ids(product), product_ids(up),
                                residual, static_cast<Activation>(activation));
            },
            nb::arg("epilogue"), nb::arg("out"), nb::arg("product"), nb::arg("up"), nb::arg("residual"),
            nb::arg("activation"))
        .def(
            "add_attend",
            [](Program& self, int q, int k, int v, int out, int group, int slot, int num_heads, float scale, int window,
               float softcap) {
                AttendArgs args{};
                args.group = group;
                args.slot = slot;
                args.num_heads = num_heads;
                args.scale = scale;
                args.window = window;
                args.softcap = softcap;
                self.add_attend(q, k, v, out, args);
            },
            nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("out"), nb::arg("group"), nb::arg("slot"),
            nb::arg("num_heads"), nb::arg("scale"), nb::arg("window"), nb::arg("softcap"))
        .def(
            "set_head",
            [](Program& self, int x, const Ids& product, int logits, int tile_rows, int num_valid, float cap) {
                self.set_head(x, product_ids(product), logits, tile_rows, num_valid, cap);
            },
            nb::arg("x"), nb::arg("product"), nb::arg("logits"), nb::arg("tile_rows"), nb::arg("num_valid"),
            nb::arg("cap"))
        .def("run", run, nb::arg("step"))
        .def("logits", logits, nb::arg("out"))
        .def("states", states, nb::arg("out"))
        .def("sample", sample, nb::arg("drawing"), nb::arg("processing").none() = nb::none())
        .def("proceed", proceed, nb::arg("step"), nb::arg("drawing"), nb::arg("ends"))
        .def("timings", [](const Program& self) {
            std::vector<std::tuple<std::vector<std::tuple<int64_t, int64_t>>, int64_t>> out;
            for (const Program::Timings* timings : {&self.decodes(), &self.others()}) {
                std::vector<std::tuple<int64_t, int64_t>> phases;
                for (const auto& phase : timings->phases) phases.emplace_back(phase.nanoseconds, phase.runs);
                out.emplace_back(std::move(phases), timings->outside);
            }
            return out;
        });
}

}  // namespace

void bind_plan(nb::module_& m) {
    m.def("row_ops", [] {
        std::vector<std::string> names;
        for (const RowOp& op : row_ops()) names.emplace_back(op.name);
        return names;
    });
    bind_machine(m);
    bind_step(m);
    m.def("advance", advance, nb::arg("step"), nb::arg("drawing"));
    bind_program(m);
}

}  // namespace pelton
