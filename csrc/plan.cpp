#include "plan.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <ctime>
#include <stdexcept>

#include "ops/sample.h"

namespace pelton {

Program::Program(Machine& machine, std::vector<KVCache*> caches, Sizes sizes, bool profile)
    : machine_(machine),
      caches_(std::move(caches)),
      arena_(sizes.arena),
      workspace_(sizes.workspace),
      scratch_(machine.scratch_bytes(sizes.max_tokens)),
      epilogue_bytes_(epilogue_bytes(sizes.max_tokens)),
      profile_(profile) {}

int Program::add_rows(size_t offset, int width, int stride) {
    Operand operand;
    operand.rows = {reinterpret_cast<float*>(arena_.data() + offset), width, stride};
    operand.width = width;
    operands_.push_back(operand);
    return static_cast<int>(operands_.size()) - 1;
}

int Program::add_prepared(size_t offset, int width, Family family) {
    Operand operand;
    operand.prepared = arena_.data() + offset;
    operand.width = width;
    operand.family = family;
    operands_.push_back(operand);
    return static_cast<int>(operands_.size()) - 1;
}

int Program::add_vector(const float* values, int width) {
    Operand operand;
    operand.vector = values;
    operand.width = width;
    operands_.push_back(operand);
    return static_cast<int>(operands_.size()) - 1;
}

int Program::add_matrix(WeightType type, const uint8_t* tiles, int N, int K) {
    const LinearKernel* kernel = machine_.linear(type);
    if (!kernel) throw std::invalid_argument("no kernel for this weight type");
    Operand operand;
    operand.matrix = {kernel, tiles, N, K, kernel->tile_bytes(K)};
    operand.width = K;
    operands_.push_back(operand);
    return static_cast<int>(operands_.size()) - 1;
}

Operand Program::operand(int id) const { return id < 0 ? Operand{} : operands_.at(static_cast<size_t>(id)); }

Product Program::product(ProductIds ids) const {
    const Operand x = operand(ids.x), weight = operand(ids.weight);
    if (ids.weight >= 0 && (!x.prepared || !weight.matrix.kernel || x.family != weight.matrix.kernel->family ||
                            x.width != weight.matrix.K))
        throw std::invalid_argument("a linear's activations do not fit its weight");
    return {weight.matrix, x.prepared, operand(ids.bias).vector};
}

void Program::begin_rows(bool per_logit_row) { phases_.push_back(RowPhase{per_logit_row, {}}); }

void Program::begin_linears(bool per_logit_row) { phases_.push_back(LinearPhase{per_logit_row, {}}); }

void Program::add_row_step(const std::string& name, const std::vector<int>& outs, const std::vector<int>& ins,
                           const std::vector<int>& ints, const std::vector<double>& floats) {
    const auto is_right = [](int wanted, size_t given) { return wanted < 0 || static_cast<size_t>(wanted) == given; };
    for (const RowOp& op : row_ops()) {
        if (op.name != name) continue;
        if (!is_right(op.num_ins, ins.size()) || !is_right(op.num_ints, ints.size()) ||
            !is_right(op.num_floats, floats.size()) || outs.empty())
            throw std::invalid_argument(name + ": wrong number of operands");
        RowStep step{op.run, {}, {}, ints, floats};
        for (int id : outs) step.outs.push_back(operand(id));
        for (int id : ins) step.ins.push_back(operand(id));
        std::get<RowPhase>(phases_.back()).steps.push_back(std::move(step));
        return;
    }
    throw std::invalid_argument("there is no row op named " + name);
}

void Program::add_linear(Linear::Epilogue epilogue, int out, ProductIds first, ProductIds up, int residual,
                         Activation activation) {
    Linear linear;
    linear.epilogue = epilogue;
    linear.product = product(first);
    linear.up = product(up);
    linear.activation = activation;
    linear.residual = operand(residual).rows;
    linear.out = operand(out).rows;
    std::get<LinearPhase>(phases_.back()).linears.push_back(linear);
}

void Program::add_attend(int q, int k, int v, int out, AttendArgs args) {
    const KVCache& cache = *caches_.at(static_cast<size_t>(args.group));
    if (attend_scratch(cache.shape(), args.num_heads) > kScratchBytes)
        throw std::invalid_argument("the heads that share keys are too many or too wide");
    args.q = operand(q).rows;
    args.k = operand(k).rows;
    args.v = operand(v).rows;
    args.out = operand(out).rows;
    phases_.push_back(args);
}

void Program::set_head(int x, ProductIds ids, int logits, int tile_rows, int num_valid, float cap) {
    if (sample_scratch(num_valid) > kScratchBytes) throw std::invalid_argument("the vocabulary is too large to sample");
    Linear linear;
    linear.epilogue = cap > 0.0f ? Linear::Epilogue::Softcap : Linear::Epilogue::Plain;
    linear.product = product(ids);
    linear.cap = cap;
    linear.out = operand(logits).rows;
    head_ = {linear};
    head_x_ = operand(x);
    head_rows_ = tile_rows;
    num_valid_ = num_valid;
}

StepContext Program::context() {
    uint8_t* scratch = scratch_.data();
    return {machine_.pool,
            machine_.kernels,
            batch_,
            caches_.data(),
            scratch,
            workspace_.data(),
            scratch + static_cast<size_t>(machine_.pool.size()) * kScratchBytes,
            epilogue_bytes_};
}

template <class Body>
void Program::timed(size_t index, const Body& body) {
    if (!profile_) return body();
    const auto start = std::chrono::steady_clock::now();
    body();
    const auto time = std::chrono::steady_clock::now() - start;
    Timings::Phase& phase = timings_[kind_].phases[index];
    phase.nanoseconds += std::chrono::duration_cast<std::chrono::nanoseconds>(time).count();
    phase.runs++;
}

static int64_t thread_time() {
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

void Program::enter() {
    if (!profile_) return;
    Timings& timings = timings_[kind_];
    timings.phases.resize(phases_.size() + 2);
    if (left_by_ == std::this_thread::get_id()) timings.outside += thread_time() - left_at_;
}

void Program::leave() {
    if (!profile_) return;
    left_by_ = std::this_thread::get_id();
    left_at_ = thread_time();
}

void Program::run(const BatchView& batch) {
    batch_ = batch;
    kind_ = batch.num_tokens == batch.num_sequences ? 0 : 1;
    enter();
    const StepContext step = context();
    machine_.pool.wake();
    for (size_t i = 0; i < phases_.size(); i++)
        timed(i, [&] { std::visit([&](const auto& phase) { run_phase(step, phase); }, phases_[i]); });
    leave();
}

void Program::run_phase(const StepContext& context, const RowPhase& phase) {
    const int total = num_rows(phase.per_logit_row);
    machine_.pool.run((total + kTileRows - 1) / kTileRows, [&](int block, int) {
        const int begin = block * kTileRows;
        const RowRange range{begin, std::min(begin + kTileRows, total), total};
        for (const RowStep& step : phase.steps) step.run(step, context, range);
    });
}

void Program::run_phase(const StepContext& context, const LinearPhase& phase) {
    const int total = num_rows(phase.per_logit_row);
    if (total > 0) run_linears(context, phase.linears, total);
}

void Program::run_phase(const StepContext& context, const AttendArgs& args) {
    if (batch_.num_tokens > 0) attend(context, args);
}

void Program::run_head(const UseLogits& use) {
    if (head_.empty()) throw std::logic_error("this plan has no head");
    enter();
    const StepContext step = context();
    const Product& product = head_[0].product;
    const ActivationKernel& kernel =
        machine_.kernels.linear.activations[static_cast<int>(product.weight.kernel->family)];
    machine_.pool.wake();
    for (int first = 0; first < batch_.num_drawn; first += head_rows_) {
        const int count = std::min(head_rows_, batch_.num_drawn - first);
        timed(phases_.size(), [&] {
            kernel.prepare(head_x_.rows.row(first), static_cast<size_t>(head_x_.rows.stride), 0, count, count,
                           head_x_.width, const_cast<uint8_t*>(product.x));
            run_linears(step, head_, count);
        });
        timed(phases_.size() + 1, [&] { use(step, first, count, head_[0].out); });
    }
    leave();
}

void Program::states(float* out) const {
    const auto width = static_cast<size_t>(head_x_.width);
    for (int r = 0; r < num_pooled(); r++)
        std::memcpy(out + static_cast<size_t>(r) * width, head_x_.rows.row(num_drawn() + r), width * sizeof(float));
}

}  // namespace pelton
