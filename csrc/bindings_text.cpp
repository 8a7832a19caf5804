// Text as tokens. nanobind only; no logic.
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "text/byte_pairs.h"
#include "text/sentencepiece.h"
#include "text/vocabulary.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pelton {
namespace {

using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

EncodedStrings strings(const Bytes& data, size_t count) {
    if (count > data.shape(0) / 8) throw nb::value_error(" ends too early");
    return {{reinterpret_cast<const char*>(data.data()), data.shape(0)}, count};
}

void check_id(const Vocabulary& vocabulary, int32_t id) {
    if (id < 0 || static_cast<size_t>(id) >= vocabulary.size()) throw nb::index_error("token id");
}

void bind_vocabulary(nb::module_& m) {
    nb::class_<Vocabulary>(m, "Vocabulary")
        .def(
            "__init__",
            [](Vocabulary* self, const Bytes& data, size_t count) {
                const EncodedStrings texts = strings(data, count);
                nb::gil_scoped_release release;
                new (self) Vocabulary(texts);
            },
            "data"_a, "count"_a)
        .def("__len__", &Vocabulary::size)
        .def(
            "text",
            [](const Vocabulary& self, int32_t id) {
                check_id(self, id);
                return self.text(id);
            },
            "id"_a)
        .def("id_of", &Vocabulary::id_of, "text"_a)
        .def(
            "hide",
            [](Vocabulary& self, const Ints& ids) {
                for (size_t i = 0; i < ids.shape(0); i++) check_id(self, ids.data()[i]);
                for (size_t i = 0; i < ids.shape(0); i++) self.hide(ids.data()[i]);
            },
            "ids"_a)
        .def("longest", &Vocabulary::longest);
}

}  // namespace

void bind_text(nb::module_& m) {
    m.def(
        "skip_strings",
        [](const Bytes& data, size_t count) {
            const std::string_view all(reinterpret_cast<const char*>(data.data()), data.shape(0));
            std::string_view left = all;
            const size_t whole = skip_strings(left, count);
            return std::pair(whole, all.size() - left.size());
        },
        "data"_a, "count"_a);
    bind_vocabulary(m);
    nb::class_<SentencePiece>(m, "SentencePiece")
        .def(
            "__init__",
            [](SentencePiece* self, const Vocabulary& vocabulary, const Ints& ranks, const Ints& byte_ids) {
                if (ranks.shape(0) != vocabulary.size() || byte_ids.shape(0) != 256) throw nb::value_error("lengths");
                new (self) SentencePiece(vocabulary, ranks.data(), byte_ids.data());
            },
            "vocabulary"_a, "ranks"_a, "byte_ids"_a, nb::keep_alive<1, 2>())
        .def("encode", &SentencePiece::encode, "text"_a, nb::call_guard<nb::gil_scoped_release>());
    nb::class_<BytePairs>(m, "BytePairs")
        .def(
            "__init__",
            [](BytePairs* self, const Vocabulary& vocabulary, const Bytes& merges, size_t count,
               std::array<std::string, 256> characters, bool takes_words) {
                const EncodedStrings encoded = strings(merges, count);
                nb::gil_scoped_release release;
                new (self) BytePairs(vocabulary, encoded, std::move(characters), takes_words);
            },
            "vocabulary"_a, "merges"_a, "count"_a, "characters"_a, "takes_words"_a, nb::keep_alive<1, 2>())
        .def("encode", &BytePairs::encode, "text"_a, "words"_a, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace pelton
