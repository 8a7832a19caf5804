// rows.h: steps of a plan that work row by row, so that a block of rows can go through several of them at once.
#pragma once

#include <string_view>
#include <vector>

#include "context.h"
#include "kernels/rows.h"
#include "ops/linear.h"

namespace pelton {

// Whatever a step reads or writes: exactly one of these is set, all null where an optional operand is absent.
struct Operand {
    Rows rows;                      // an intermediate
    uint8_t* prepared = nullptr;    // activations in a family's form
    const float* vector = nullptr;  // a small weight
    Matrix matrix;                  // a large one
    int width = 0;
    Family family = Family::Float32;  // of `prepared`
};

struct RowRange {
    int begin, end;  // the rows of this call, begin a multiple of 16
    int total;       // of the step
};

struct RowStep {
    void (*run)(const RowStep& step, const StepContext& context, RowRange range) = nullptr;
    std::vector<Operand> outs;
    std::vector<Operand> ins;
    std::vector<int> ints;
    std::vector<double> floats;
};

// A row op's function, and how many operands and numbers it must be given (-1: any).
struct RowOp {
    std::string_view name;
    decltype(RowStep::run) run;
    int num_ins, num_ints, num_floats;
};
const std::vector<RowOp>& row_ops();

}  // namespace pelton
