// plan.h: a recorded model ready to run: phases over one arena, and the head that waits for sampling.
#pragma once

#include <functional>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "context.h"
#include "machine.h"
#include "ops/attention.h"
#include "ops/linear.h"
#include "ops/rows.h"

namespace pelton {

class Program {
  public:
    struct Sizes {
        size_t arena;
        size_t workspace;
        int max_tokens;
    };

    // The machine, the caches and all weights outlive the program.
    Program(Machine& machine, std::vector<KVCache*> caches, Sizes sizes, bool profile);

    // Building: operands are numbered in the order in which they are added; -1 stands for one not given.
    int add_rows(size_t offset, int width, int stride);
    int add_prepared(size_t offset, int width, Family family);
    int add_vector(const float* values, int width);
    int add_matrix(WeightType type, const uint8_t* tiles, int N, int K);

    // Each phase is begun, then filled with steps of its kind. `per_logit_row`: it runs over R rows, not T.
    void begin_rows(bool per_logit_row);
    void begin_linears(bool per_logit_row);
    // Throws std::invalid_argument for an op that is not among row_ops(), or operands it cannot take.
    void add_row_step(const std::string& op, const std::vector<int>& outs, const std::vector<int>& ins,
                      const std::vector<int>& ints, const std::vector<double>& floats);
    // The operands of one product: x (prepared), weight, bias.
    struct ProductIds {
        int x = -1, weight = -1, bias = -1;
    };
    void add_linear(Linear::Epilogue epilogue, int out, ProductIds product, ProductIds up, int residual,
                    Activation activation);
    // A phase of its own; `args` without its rows.
    void add_attend(int q, int k, int v, int out, AttendArgs args);
    // The head: x [R, width] as it stands after a step, in tiles of at most `tile_rows` rows; `prepared` and
    // `logits` are operands large enough for one tile. `num_valid`: rows of the weight that are real. cap 0: none.
    void set_head(int x, ProductIds product, int logits, int tile_rows, int num_valid, float cap);

    // One step; returns when it has run.
    void run(const BatchView& batch);

    // Runs the head over the rows of the last step that are drawn, tile by tile: use(first row, rows, their logits).
    using UseLogits = std::function<void(const StepContext& context, int first, int count, const Rows& logits)>;
    void run_head(const UseLogits& use);
    int num_drawn() const { return batch_.num_drawn; }
    // What the head would read of the last step's other rows, which are pooled: [num_pooled, width].
    void states(float* out) const;
    int num_pooled() const { return batch_.num_logit_rows - batch_.num_drawn; }
    int width() const { return head_x_.width; }
    int num_valid() const { return num_valid_; }

    // What profiling has measured of one kind of step.
    struct Timings {
        struct Phase {
            int64_t nanoseconds = 0;
            int64_t runs = 0;
        };
        std::vector<Phase> phases;  // behind the program's own: the head, and sampling
        int64_t outside = 0;        // CPU nanoseconds of the calling thread between its calls
    };
    // Steps in which each sequence has one token, and all others. Empty unless profiling is on.
    const Timings& decodes() const { return timings_[0]; }
    const Timings& others() const { return timings_[1]; }

  private:
    struct RowPhase {
        bool per_logit_row;
        std::vector<RowStep> steps;
    };
    struct LinearPhase {
        bool per_logit_row;
        std::vector<Linear> linears;
    };
    using Phase = std::variant<RowPhase, LinearPhase, AttendArgs>;

    Operand operand(int id) const;
    Product product(ProductIds ids) const;
    StepContext context();
    int num_rows(bool per_logit_row) const { return per_logit_row ? batch_.num_logit_rows : batch_.num_tokens; }
    void run_phase(const StepContext& context, const RowPhase& phase);
    void run_phase(const StepContext& context, const LinearPhase& phase);
    void run_phase(const StepContext& context, const AttendArgs& args);
    template <class Body>
    void timed(size_t index, const Body& body);
    void enter();
    void leave();

    Machine& machine_;
    std::vector<KVCache*> caches_;
    Memory arena_, workspace_, scratch_;
    size_t epilogue_bytes_;
    bool profile_;
    Timings timings_[2];
    int kind_ = 0;             // of the current step
    std::thread::id left_by_;  // who made the last call
    int64_t left_at_ = 0;      // and that thread's CPU time as it returned
    std::vector<Operand> operands_;
    std::vector<Phase> phases_;
    BatchView batch_;

    std::vector<Linear> head_;  // one, or none
    Operand head_x_;
    int head_rows_ = 0;
    int num_valid_ = 0;
};

}  // namespace pelton
