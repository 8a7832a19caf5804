#include "threads.h"

#include <sched.h>

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

void pin_to(int index) {
#if defined(__linux__)
    cpu_set_t allowed, one;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
    int left = index % CPU_COUNT(&allowed);
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (!CPU_ISSET(cpu, &allowed) || left-- > 0) continue;
        CPU_ZERO(&one);
        CPU_SET(cpu, &one);
        sched_setaffinity(0, sizeof one, &one);
        return;
    }
#endif
}

constexpr uint32_t generation_of(uint64_t ticket) { return static_cast<uint32_t>(ticket >> 32); }

}  // namespace

ThreadPool::ThreadPool(int num_threads, bool pin) {
    for (int thread = 1; thread < num_threads; thread++) {
        workers_.emplace_back([this, thread, pin] {
            if (pin) pin_to(thread);
            work(thread);
        });
    }
}

ThreadPool::~ThreadPool() {
    stopping_.store(true);
    wake();
    for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::wake() {
    signal_.fetch_add(1);
    if (num_sleeping_.load() > 0) signal_.notify_all();
}

void ThreadPool::run_job(const Job& job) {
    job_ = job;
    unfinished_.store(job.num_chunks, std::memory_order_relaxed);
    const uint32_t generation = generation_of(ticket_.load(std::memory_order_relaxed)) + 1;
    ticket_.store(uint64_t{generation} << 32 | static_cast<uint32_t>(job.num_chunks));
    if (num_sleeping_.load() > 0) wake();
    take_chunks(generation, 0);
    if (spin_until([&] { return unfinished_.load(std::memory_order_acquire) == 0; })) return;
    for (int32_t left; (left = unfinished_.load(std::memory_order_acquire)) != 0;) unfinished_.wait(left);
}

void ThreadPool::take_chunks(uint32_t generation, int thread) {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    while (generation_of(ticket) == generation && static_cast<uint32_t>(ticket) != 0) {
        if (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel)) continue;
        // The chunk just taken is not finished, so job_ cannot change before we say that it is.
        job_.call(job_.self, job_.num_chunks - static_cast<int>(static_cast<uint32_t>(ticket)), thread);
        if (unfinished_.fetch_sub(1, std::memory_order_acq_rel) == 1 && thread != 0) unfinished_.notify_one();
        ticket = ticket_.load(std::memory_order_acquire);
    }
}

// The number of a job newer than `seen`, or `seen` itself when the pool stops.
uint32_t ThreadPool::await_job(uint32_t seen) {
    const auto is_new = [&] { return generation_of(ticket_.load()) != seen || stopping_.load(); };
    while (!spin_until(is_new)) {
        num_sleeping_.fetch_add(1);
        const int32_t signal = signal_.load();
        if (!is_new()) signal_.wait(signal);
        num_sleeping_.fetch_sub(1);
    }
    return generation_of(ticket_.load());
}

void ThreadPool::work(int thread) {
    uint32_t seen = 0;
    while (!stopping_.load()) {
        seen = await_job(seen);
        take_chunks(seen, thread);
    }
}

}  // namespace pelton
