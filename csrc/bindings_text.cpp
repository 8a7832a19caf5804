// Text as tokens. nanobind only; no logic.
#include <nanobind/ndarray.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "text/sentencepiece.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pelton {
namespace {

using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

}  // namespace

void bind_text(nb::module_& m) {
    nb::class_<SentencePiece>(m, "SentencePiece")
        .def(
            "__init__",
            [](SentencePiece* self, const std::vector<std::string_view>& tokens, const Ints& ranks,
               const Ints& byte_ids) {
                if (ranks.shape(0) != tokens.size() || byte_ids.shape(0) != 256) throw nb::value_error("lengths");
                new (self) SentencePiece(tokens, ranks.data(), byte_ids.data());
            },
            "tokens"_a, "ranks"_a, "byte_ids"_a)
        .def("encode", &SentencePiece::encode, "text"_a, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace pelton
