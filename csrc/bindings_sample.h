// bindings_sample.h: SampleArrays and Sampled of ops/sampling.py as the core reads and fills them.
#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "ops/sample.h"

namespace pelton {

// Views that live as long as the Python object. Throw std::bad_cast for an array of another type or layout, ValueError
// for one of another shape.
SampleParams sample_params(nanobind::handle arrays, int num_rows, int vocab_size);
SampleResult sample_result(nanobind::handle sampled, int num_rows);

// SampleArrays and Sampled that stay where they are, of `num_rows` rows each.
class Drawing {
  public:
    Drawing(nanobind::object arrays, nanobind::object sampled, int rows, int vocab_size);

    const int num_rows;
    const SampleParams params;
    const SampleResult result;

    int32_t* positions() { return positions_; }

  private:
    nanobind::object arrays_, sampled_;
    int32_t* positions_;
};

// A Processing of ops/sampling.py, or None. `sample` is called without Python's lock; it takes it for as long as the
// processors run.
class Processing {
  public:
    Processing(nanobind::handle processing, int num_rows);
    void sample(const StepContext& step, int first, int count, const Rows& logits, SampleParams params,
                const SampleResult& result);

  private:
    nanobind::object apply_;
    std::vector<int32_t> rows_, places_;
};

}  // namespace pelton
