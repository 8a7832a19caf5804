#include "ops/rows.h"

#include <cmath>
#include <cstring>

namespace pelton {
namespace {

size_t bytes_of(int floats) { return static_cast<size_t>(floats) * sizeof(float); }

void embed(const RowStep& step, const StepContext& context, RowRange range) {
    const Matrix& table = step.ins[0].matrix;
    for (int r = range.begin; r < range.end; r++) {
        const int id = context.batch.ids[r];
        const uint8_t* tile = table.tiles + static_cast<size_t>(id / kTileRows) * table.tile_bytes;
        table.kernel->unpack_row(tile, id % kTileRows, table.K, step.outs[0].rows.row(r));
    }
}

void take(const RowStep& step, const StepContext& context, RowRange range) {
    for (int r = range.begin; r < range.end; r++)
        std::memcpy(step.outs[0].rows.row(r), step.ins[0].rows.row(context.batch.logit_rows[r]),
                    bytes_of(step.outs[0].width));
}

void prepare(const RowStep& step, const StepContext& context, RowRange range) {
    const Rows& x = step.ins[0].rows;
    const ActivationKernel& kernel = context.kernels.linear.activations[static_cast<int>(step.outs[0].family)];
    kernel.prepare(x.data, static_cast<size_t>(x.stride), range.begin, range.end, range.total, x.width,
                   step.outs[0].prepared);
}

// floats: scale, then the angular frequencies. Computed in double, as the definition is, then rounded once.
void angles(const RowStep& step, const StepContext& context, RowRange range) {
    const int half = step.outs[0].width / 2;
    const double scale = step.floats[0];
    for (int r = range.begin; r < range.end; r++) {
        float* out = step.outs[0].rows.row(r);
        const double position = context.batch.positions[r];
        for (int i = 0; i < half; i++) {
            const double angle = position * step.floats[static_cast<size_t>(i) + 1];
            out[i] = static_cast<float>(std::cos(angle) * scale);
            out[half + i] = static_cast<float>(std::sin(angle) * scale);
        }
    }
}

void rope(const RowStep& step, const StepContext& context, RowRange range) {
    const int num_heads = step.ints[0], dim = step.ints[1];
    for (int r = range.begin; r < range.end; r++)
        context.kernels.rows->rope(step.ins[0].rows.row(r), step.ins[1].rows.row(r), num_heads,
                                   step.outs[0].width / num_heads, dim, step.outs[0].rows.row(r));
}

void rms_norm(const RowStep& step, const StepContext& context, RowRange range) {
    const int groups = step.ints[0];
    for (int r = range.begin; r < range.end; r++)
        context.kernels.rows->rms_norm(step.ins[0].rows.row(r), step.ins[1].vector, step.outs[0].width / groups, groups,
                                       static_cast<float>(step.floats[0]), step.outs[0].rows.row(r));
}

void layer_norm(const RowStep& step, const StepContext& context, RowRange range) {
    for (int r = range.begin; r < range.end; r++)
        context.kernels.rows->layer_norm(step.ins[0].rows.row(r), step.ins[1].vector, step.ins[2].vector,
                                         step.outs[0].width, static_cast<float>(step.floats[0]),
                                         step.outs[0].rows.row(r));
}

// The second operand of add and mul: the same row for all if it is a weight.
const float* other(const Operand& operand, int r) { return operand.vector ? operand.vector : operand.rows.row(r); }

void add(const RowStep& step, const StepContext& context, RowRange range) {
    for (int r = range.begin; r < range.end; r++)
        context.kernels.rows->add(step.ins[0].rows.row(r), other(step.ins[1], r), step.outs[0].width,
                                  step.outs[0].rows.row(r));
}

void mul(const RowStep& step, const StepContext& context, RowRange range) {
    const bool one_per_row = step.ins[1].width == 1 && step.outs[0].width != 1;
    for (int r = range.begin; r < range.end; r++) {
        const float *x = step.ins[0].rows.row(r), *y = other(step.ins[1], r);
        float* out = step.outs[0].rows.row(r);
        if (one_per_row)
            context.kernels.rows->scale(x, *y, step.outs[0].width, out);
        else
            context.kernels.rows->mul(x, y, step.outs[0].width, out);
    }
}

void scale(const RowStep& step, const StepContext& context, RowRange range) {
    for (int r = range.begin; r < range.end; r++)
        context.kernels.rows->scale(step.ins[0].rows.row(r), static_cast<float>(step.floats[0]), step.outs[0].width,
                                    step.outs[0].rows.row(r));
}

void act(const RowStep& step, const StepContext& context, RowRange range) {
    for (int r = range.begin; r < range.end; r++)
        context.kernels.rows->act(static_cast<Activation>(step.ints[0]), step.ins[0].rows.row(r), step.outs[0].width,
                                  step.outs[0].rows.row(r));
}

void glu(const RowStep& step, const StepContext& context, RowRange range) {
    for (int r = range.begin; r < range.end; r++)
        context.kernels.rows->glu(static_cast<Activation>(step.ints[0]), step.ins[0].rows.row(r),
                                  step.ins[1].rows.row(r), step.outs[0].width, step.outs[0].rows.row(r));
}

void softcap(const RowStep& step, const StepContext& context, RowRange range) {
    for (int r = range.begin; r < range.end; r++)
        context.kernels.rows->softcap(step.ins[0].rows.row(r), static_cast<float>(step.floats[0]), step.outs[0].width,
                                      step.outs[0].rows.row(r));
}

void split(const RowStep& step, const StepContext&, RowRange range) {
    for (int r = range.begin; r < range.end; r++) {
        const float* from = step.ins[0].rows.row(r);
        for (const Operand& out : step.outs) {
            std::memcpy(out.rows.row(r), from, bytes_of(out.width));
            from += out.width;
        }
    }
}

void concat(const RowStep& step, const StepContext&, RowRange range) {
    const int groups = step.ints[0];
    for (int r = range.begin; r < range.end; r++) {
        float* out = step.outs[0].rows.row(r);
        for (int g = 0; g < groups; g++) {
            for (const Operand& part : step.ins) {
                const int width = part.width / groups;
                std::memcpy(out, part.rows.row(r) + g * width, bytes_of(width));
                out += width;
            }
        }
    }
}

void regroup(const RowStep& step, const StepContext&, RowRange range) {
    const int groups = step.ints[0], first = step.ints[1], last = step.ints[2];
    const int width = step.ins[0].width / groups, count = last - first;
    for (int r = range.begin; r < range.end; r++) {
        const float* from = step.ins[0].rows.row(r) + first;
        float* out = step.outs[0].rows.row(r);
        for (int g = 0; g < groups; g++) std::memcpy(out + g * count, from + g * width, bytes_of(count));
    }
}

void repeat(const RowStep& step, const StepContext&, RowRange range) {
    const int width = step.ins[0].width;
    for (int r = range.begin; r < range.end; r++) {
        for (int i = 0; i < step.ints[0]; i++)
            std::memcpy(step.outs[0].rows.row(r) + i * width, step.ins[0].rows.row(r), bytes_of(width));
    }
}

}  // namespace

const std::vector<RowOp>& row_ops() {
    static const std::vector<RowOp> ops = {
        {"embed", embed, 1, 0, 0},     {"take", take, 1, 0, 0},       {"prepare", prepare, 1, 0, 0},
        {"angles", angles, 0, 0, -1},  {"rope", rope, 2, 2, 0},       {"rms_norm", rms_norm, 2, 1, 1},
        {"add", add, 2, 0, 0},         {"mul", mul, 2, 0, 0},         {"layer_norm", layer_norm, 3, 0, 1},
        {"scale", scale, 1, 0, 1},     {"act", act, 1, 1, 0},         {"glu", glu, 2, 1, 0},
        {"softcap", softcap, 1, 0, 1}, {"split", split, 1, 0, 0},     {"concat", concat, -1, 1, 0},
        {"repeat", repeat, 1, 1, 0},   {"regroup", regroup, 1, 3, 0},
    };
    return ops;
}

}  // namespace pelton
