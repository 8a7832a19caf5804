// bindings.h: what each bindings_*.cpp adds to the module.
#pragma once

#include <nanobind/nanobind.h>

namespace pelton {

void bind_attention(nanobind::module_& m);
void bind_plan(nanobind::module_& m);
void bind_linear(nanobind::module_& m);
void bind_sample(nanobind::module_& m);
void bind_text(nanobind::module_& m);

}  // namespace pelton
