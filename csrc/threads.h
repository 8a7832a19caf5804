// threads.h: a persistent pool of threads that work through numbered chunks together with the caller.
//
// A job is done when its chunks are, not when every thread has shown up: a thread that the machine has put
// aside delays nothing but the chunk it holds. Idle threads spin for a short while (a step is a row of jobs
// a few microseconds apart), then yield, then sleep.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace pelton {

class ThreadPool {
  public:
    // `num_threads` (at least 1) counts the caller. With `pin`, thread i stays on the i-th CPU this process
    // may use.
    explicit ThreadPool(int num_threads, bool pin = false);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int size() const { return static_cast<int>(workers_.size()) + 1; }

    // Calls body(chunk, thread) once for every chunk in [0, num_chunks) and returns when all are done.
    // `thread` in [0, size()) says which scratch memory is the body's. One caller at a time; bodies do not
    // throw and do not nest.
    template <class Body>
    void run(int num_chunks, const Body& body) {
        if (num_chunks <= 1 || workers_.empty()) {
            for (int chunk = 0; chunk < num_chunks; chunk++) body(chunk, 0);
            return;
        }
        const auto call = [](const void* self, int chunk, int thread) {
            (*static_cast<const Body*>(self))(chunk, thread);
        };
        run_job({call, &body, num_chunks});
    }

    // Wakes sleeping threads without giving them work: called as a step begins.
    void wake();

  private:
    struct Job {
        void (*call)(const void* self, int chunk, int thread);
        const void* self;
        int num_chunks;
    };

    void run_job(const Job& job);
    void take_chunks(uint32_t generation, int thread);
    uint32_t await_job(uint32_t seen);
    void work(int thread);

    Job job_{};
    // The number of the current job in the high half, chunks not yet handed out in the low half: one word, so
    // that a late thread can never take a chunk of another job than the one it looked at.
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<int32_t> unfinished_{0};
    alignas(64) std::atomic<int32_t> signal_{0};  // changes when sleepers are to look again
    std::atomic<int32_t> num_sleeping_{0};
    std::atomic<bool> stopping_{false};
    std::vector<std::thread> workers_;
};

}  // namespace pelton
