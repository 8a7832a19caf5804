#include "threads.h"

#include <sched.h>

#include <algorithm>
#include <chrono>

namespace pelton {
namespace {

constexpr auto kSpin = std::chrono::microseconds(50);
constexpr int kYields = 50;

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Spins, then yields, until ready() or patience is at its end; returns whether it was ready.
template <class Ready>
bool spin_until(const Ready& ready) {
    const auto end = std::chrono::steady_clock::now() + kSpin;
    do {
        for (int i = 0; i < 64; i++) {
            if (ready()) return true;
            pause();
        }
    } while (std::chrono::steady_clock::now() < end);
    for (int i = 0; i < kYields; i++) {
        if (ready()) return true;
        sched_yield();
    }
    return ready();
}

int first_of(uint64_t left) { return static_cast<int>(left >> 32); }
int end_of(uint64_t left) { return static_cast<int>(static_cast<uint32_t>(left)); }

}  // namespace

int ThreadPool::Share::take_first() {
    uint64_t now = left.load(std::memory_order_acquire);
    while (first_of(now) < end_of(now)) {
        if (left.compare_exchange_weak(now, now + (uint64_t{1} << 32), std::memory_order_acq_rel)) return first_of(now);
    }
    return -1;
}

int ThreadPool::Share::take_last() {
    uint64_t now = left.load(std::memory_order_acquire);
    while (first_of(now) < end_of(now)) {
        if (left.compare_exchange_weak(now, now - 1, std::memory_order_acq_rel)) return end_of(now) - 1;
    }
    return -1;
}

ThreadPool::ThreadPool(int num_threads) : shares_(new Share[static_cast<size_t>(std::max(1, num_threads))]) {
    for (int thread = 1; thread < num_threads; thread++) {
        workers_.emplace_back([this, thread] { work(thread); });
    }
}

ThreadPool::~ThreadPool() {
    stopping_.store(true);
    wake();
    for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::wake() {
    if (num_sleeping_.load() == 0) return;
    signal_.fetch_add(1);
    signal_.notify_all();
}

void ThreadPool::meet(int times) {
    for (int i = 0; i < times; i++) {
        alignas(64) std::atomic<int> num_begun{0};
        run(size(), [&](int, int) {
            num_begun.fetch_add(1);
            while (!spin_until([&] { return num_begun.load(std::memory_order_acquire) == size(); })) {
            }
        });
    }
}

void ThreadPool::run_job(const Job& job) {
    job_ = job;
    unfinished_.store(job.num_chunks);
    const int each = job.num_chunks / size(), more = job.num_chunks % size();
    for (int thread = 0, begin = 0; thread < size(); thread++) {
        const int end = begin + each + (thread < more ? 1 : 0);
        shares_[static_cast<size_t>(thread)].give(begin, end);
        begin = end;
    }
    job_number_.fetch_add(1);
    wake();
    take_chunks(0);
    if (spin_until([&] { return unfinished_.load(std::memory_order_acquire) == 0; })) return;
    for (int32_t left; (left = unfinished_.load(std::memory_order_acquire)) != 0;) unfinished_.wait(left);
}

// job_ cannot change before the chunks that were taken here are finished, which is said once for all of them.
void ThreadPool::take_chunks(int thread) {
    int32_t count = 0;
    for (int chunk; (chunk = next_chunk(thread)) >= 0; count++) job_.call(job_.self, chunk, thread);
    if (count == 0) return;
    if (unfinished_.fetch_sub(count, std::memory_order_acq_rel) == count && thread != 0) unfinished_.notify_one();
}

int ThreadPool::next_chunk(int thread) {
    int chunk = shares_[static_cast<size_t>(thread)].take_first();
    for (int i = 1; chunk < 0 && i < size(); i++) {
        chunk = shares_[static_cast<size_t>((thread + i) % size())].take_last();
    }
    return chunk;
}

// The number of a job newer than `seen`, or anything when the pool stops.
uint32_t ThreadPool::await_job(uint32_t seen) {
    const auto is_new = [&] { return job_number_.load() != seen || stopping_.load(); };
    while (!spin_until(is_new)) {
        num_sleeping_.fetch_add(1);
        const int32_t signal = signal_.load();
        if (!is_new()) signal_.wait(signal);
        num_sleeping_.fetch_sub(1);
    }
    return job_number_.load();
}

void ThreadPool::work(int thread) {
    uint32_t seen = 0;
    while (!stopping_.load()) {
        seen = await_job(seen);
        take_chunks(thread);
    }
}

}  // namespace pelton
