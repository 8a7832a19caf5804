// Sampling alone for its tests, and what the plan's bindings need for it. nanobind only; no logic.
#include "bindings_sample.h"

#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "bindings.h"
#include "machine.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pelton {
namespace {

template <class T, int N = 1>
using Array = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;

// No conversion: a converted copy would not live as long as the object.
template <class T>
T* view(nb::handle object, const char* name) {
    return nb::cast<Array<T>>(object.attr(name), false).data();
}

template <class T>
T* view(nb::handle object, const char* name, int size) {
    const auto array = nb::cast<Array<T>>(object.attr(name), false);
    if (array.shape(0) != static_cast<size_t>(size)) throw nb::value_error(name);
    return array.data();
}

template <class T>
T* view(nb::handle object, const char* name, int rows, int columns) {
    const auto array = nb::cast<Array<T, 2>>(object.attr(name), false);
    if (array.shape(0) < static_cast<size_t>(rows) || array.shape(1) != static_cast<size_t>(columns)) {
        throw nb::value_error(name);
    }
    return array.data();
}

// Draws from whole logits, again and again.
void sample_alone(Machine& machine, Array<const float, 2> logits, nb::handle params, nb::handle out,
                  nb::handle processing, int repeat) {
    const int num_rows = static_cast<int>(logits.shape(0)), vocab_size = static_cast<int>(logits.shape(1));
    if (sample_scratch(vocab_size) > kScratchBytes) throw std::invalid_argument("the vocabulary is too large");
    const SampleParams views = sample_params(params, num_rows, vocab_size);
    const SampleResult result = sample_result(out, num_rows);
    Processing processors(processing, num_rows);
    nb::gil_scoped_release release;
    const Memory scratch(kScratchBytes * static_cast<size_t>(machine.pool.size()));
    const StepContext step{machine.pool, machine.kernels, {}, nullptr, scratch.data(), nullptr};
    const Rows rows{const_cast<float*>(logits.data()), vocab_size, vocab_size};
    for (int i = 0; i < repeat; i++) processors.sample(step, 0, num_rows, rows, views, result);
}

}  // namespace

SampleParams sample_params(nb::handle arrays, int num_rows, int vocab_size) {
    const bool has_masks = !arrays.attr("masks").is_none();
    return {
        vocab_size,
        view<const int32_t>(arrays, "targets", num_rows),
        view<const float>(arrays, "temperature", num_rows),
        view<const float>(arrays, "top_p", num_rows),
        view<const float>(arrays, "min_p", num_rows),
        view<const int32_t>(arrays, "top_k", num_rows),
        view<const uint64_t>(arrays, "seed", num_rows),
        view<const int32_t>(arrays, "choice", num_rows),
        view<const int32_t>(arrays, "position", num_rows),
        view<const float>(arrays, "typical_p", num_rows),
        view<const float>(arrays, "top_n_sigma", num_rows),
        view<const float>(arrays, "xtc_probability", num_rows),
        view<const float>(arrays, "xtc_threshold", num_rows),
        view<const float>(arrays, "mirostat_tau", num_rows),
        view<const float>(arrays, "mirostat_eta", num_rows),
        view<const float>(arrays, "mirostat_mu", num_rows),
        view<const uint8_t>(arrays, "chain", num_rows),
        view<const float>(arrays, "repetition", num_rows),
        view<const float>(arrays, "presence", num_rows),
        view<const float>(arrays, "frequency", num_rows),
        view<const int32_t>(arrays, "history_offsets", num_rows + 1),
        view<const int32_t>(arrays, "history_ids"),
        view<const int32_t>(arrays, "history_counts"),
        view<const int32_t>(arrays, "bias_offsets", num_rows + 1),
        view<const int32_t>(arrays, "bias_ids"),
        view<const float>(arrays, "bias_values"),
        view<const int32_t>(arrays, "num_logprobs", num_rows),
        has_masks ? view<const uint32_t>(arrays, "masks", 0, (vocab_size + 31) / 32) : nullptr,
        has_masks ? view<const int32_t>(arrays, "mask_rows", num_rows) : nullptr,
        nullptr,
        nullptr,
    };
}

SampleResult sample_result(nb::handle sampled, int num_rows) {
    const int most = static_cast<int>(nb::cast<Array<int32_t, 2>>(sampled.attr("top_ids"), false).shape(1));
    return {
        view<int32_t>(sampled, "ids", num_rows),
        view<float>(sampled, "logprobs", num_rows),
        most,
        view<int32_t>(sampled, "top_ids", num_rows, most),
        view<float>(sampled, "top_logprobs", num_rows, most),
        view<int32_t>(sampled, "ranks", num_rows),
        view<float>(sampled, "mu", num_rows),
        view<uint8_t>(sampled, "errors", num_rows),
    };
}

Drawing::Drawing(nb::object arrays, nb::object sampled, int rows, int vocab_size)
    : num_rows(rows),
      params(sample_params(arrays, rows, vocab_size)),
      result(sample_result(sampled, rows)),
      arrays_(std::move(arrays)),
      sampled_(std::move(sampled)),
      positions_(view<int32_t>(arrays_, "position", rows)) {}

Processing::Processing(nb::handle processing, int num_rows) {
    if (processing.is_none()) return;
    apply_ = processing.attr("apply");
    const auto rows = nb::cast<Array<const int32_t>>(processing.attr("rows"), false);
    rows_.assign(rows.data(), rows.data() + rows.size());
    places_.assign(static_cast<size_t>(num_rows), -1);
    for (const int32_t row : rows_) places_.at(static_cast<size_t>(row)) = 0;
}

void Processing::sample(const StepContext& step, int first, int count, const Rows& logits, SampleParams params,
                        const SampleResult& result) {
    const auto begin = std::lower_bound(rows_.begin(), rows_.end(), first);
    const auto end = std::lower_bound(begin, rows_.end(), first + count);
    if (begin == end) return pelton::sample(step, first, count, logits, params, result);
    const size_t width = static_cast<size_t>(params.vocab_size), num_rows = static_cast<size_t>(end - begin);
    nb::gil_scoped_acquire python;
    float* const values = new float[num_rows * width];
    const nb::capsule owner(values, [](void* memory) noexcept { delete[] static_cast<float*>(memory); });
    for (size_t i = 0; i < num_rows; i++) {
        std::memcpy(values + i * width, logits.row(begin[static_cast<ptrdiff_t>(i)] - first), width * sizeof(float));
        places_[static_cast<size_t>(begin[static_cast<ptrdiff_t>(i)])] = static_cast<int32_t>(i);
    }
    const nb::ndarray<nb::numpy, float, nb::ndim<2>> array(values, {num_rows, width}, owner);
    nb::list rows;
    for (auto row = begin; row != end; row++) rows.append(*row);
    apply_(rows, array);
    params.overrides = values;
    params.override_rows = places_.data();
    nb::gil_scoped_release release;
    pelton::sample(step, first, count, logits, params, result);
}

void bind_sample(nb::module_& m) {
    m.def("sample_alone", &sample_alone, nb::kw_only(), "machine"_a, "logits"_a, "params"_a, "out"_a,
          "processing"_a.none() = nb::none(), "repeat"_a = 1);
}

}  // namespace pelton
