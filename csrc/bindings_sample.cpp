// Sampling alone for its tests, and what the plan's bindings need for it. nanobind only; no logic.
#include "bindings_sample.h"

#include <nanobind/ndarray.h>

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
template <class T, int N = 1>
T* view(nb::handle object, const char* name) {
    return nb::cast<Array<T, N>>(object.attr(name), false).data();
}

// Draws from whole logits, again and again.
void sample_alone(Machine& machine, Array<const float, 2> logits, nb::handle params, nb::handle out, int repeat) {
    const int vocab_size = static_cast<int>(logits.shape(1));
    if (sample_scratch(vocab_size) > kScratchBytes) throw std::invalid_argument("the vocabulary is too large");
    const SampleParams views = sample_params(params, vocab_size);
    const SampleResult result = sample_result(out);
    nb::gil_scoped_release release;
    const Memory scratch(kScratchBytes * static_cast<size_t>(machine.pool.size()));
    const StepContext step{machine.pool, machine.kernels, {}, nullptr, scratch.data(), nullptr};
    const Rows rows{const_cast<float*>(logits.data()), vocab_size, vocab_size};
    for (int i = 0; i < repeat; i++) sample(step, 0, static_cast<int>(logits.shape(0)), rows, views, result);
}

}  // namespace

SampleParams sample_params(nb::handle arrays, int vocab_size) {
    const bool has_masks = !arrays.attr("masks").is_none();
    return {
        vocab_size,
        view<const float>(arrays, "temperature"),
        view<const float>(arrays, "top_p"),
        view<const float>(arrays, "min_p"),
        view<const int32_t>(arrays, "top_k"),
        view<const uint64_t>(arrays, "seed"),
        view<const int32_t>(arrays, "choice"),
        view<const int32_t>(arrays, "position"),
        view<const float>(arrays, "repetition"),
        view<const float>(arrays, "presence"),
        view<const float>(arrays, "frequency"),
        view<const int32_t>(arrays, "history_offsets"),
        view<const int32_t>(arrays, "history_ids"),
        view<const int32_t>(arrays, "history_counts"),
        view<const int32_t>(arrays, "bias_offsets"),
        view<const int32_t>(arrays, "bias_ids"),
        view<const float>(arrays, "bias_values"),
        view<const int32_t>(arrays, "num_logprobs"),
        has_masks ? view<const uint32_t, 2>(arrays, "masks") : nullptr,
        has_masks ? view<const int32_t>(arrays, "mask_rows") : nullptr,
    };
}

SampleResult sample_result(nb::handle sampled) {
    const auto top_ids = nb::cast<Array<int32_t, 2>>(sampled.attr("top_ids"), false);
    return {
        view<int32_t>(sampled, "ids"),           view<float>(sampled, "logprobs"),
        static_cast<int>(top_ids.shape(1)),      top_ids.data(),
        view<float, 2>(sampled, "top_logprobs"), view<uint8_t>(sampled, "errors"),
    };
}

void bind_sample(nb::module_& m) {
    m.def("sample_alone", &sample_alone, nb::kw_only(), "machine"_a, "logits"_a, "params"_a, "out"_a, "repeat"_a = 1);
}

}  // namespace pelton
