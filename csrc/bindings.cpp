// bindings.cpp: nanobind only; no logic. Long calls release the GIL.
#include "bindings.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "kernels/table.h"

namespace nb = nanobind;

NB_MODULE(_core, m) {
    m.doc() = "Pelton's compiled core";
    m.def("isas", [] {
        const char* names[pelton::kMaxIsas];
        const int count = pelton::available_isas(names);
        return std::vector<std::string>(names, names + count);
    });
    pelton::bind_attention(m);
    pelton::bind_plan(m);
    pelton::bind_linear(m);
    pelton::bind_sample(m);
    pelton::bind_text(m);
}
