// bindings_sample.h: SampleArrays and Sampled of ops/sampling.py as the core reads and fills them.
#pragma once

#include <nanobind/nanobind.h>

#include "ops/sample.h"

namespace pelton {

// Views that live as long as the Python object. Throw std::bad_cast for an array of another type or layout, ValueError
// for one of another shape.
SampleParams sample_params(nanobind::handle arrays, int num_rows, int vocab_size);
SampleResult sample_result(nanobind::handle sampled, int num_rows);

}  // namespace pelton
