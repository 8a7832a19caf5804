// threads.h: a persistent pool of threads that work through numbered chunks together with the caller.
//
// Each thread has a share of a job's chunks, side by side, and works through it from its front; then it takes single
// chunks from the back of the others' shares. So a thread that the machine slows down, or has put aside, delays nothing
// but the chunk it holds. What a chunk computes never depends on who does.
//
// Idle threads spin for a short while (a step is a row of jobs a few microseconds apart), then yield, then sleep. They
// are not pinned: other engines and programs use the same cores, and the system knows which of them is free.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace pelton {

class ThreadPool {
  public:
    // `num_threads` (at least 1) counts the caller.
    explicit ThreadPool(int num_threads);
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

    // Lets all threads meet, so many times: jobs of one chunk per thread, each of which waits for the others to have
    // begun. The time of one is what handing out work and waiting for its end take by themselves.
    void meet(int times);

    // Wakes sleeping threads without giving them work: called as a step begins.
    void wake();

  private:
    struct Job {
        void (*call)(const void* self, int chunk, int thread);
        const void* self;
        int num_chunks;
    };
    // The chunks of a thread's share that nobody has begun: the first in the high half, the one behind the last in the
    // low half. One word, so that its owner and others can take from it at once.
    struct alignas(64) Share {
        std::atomic<uint64_t> left{0};

        void give(int begin, int end) {
            left.store(uint64_t{static_cast<uint32_t>(begin)} << 32 | static_cast<uint32_t>(end),
                       std::memory_order_release);
        }
        // A chunk, or -1 where none is left.
        int take_first();
        int take_last();
    };

    void run_job(const Job& job);
    void take_chunks(int thread);
    int next_chunk(int thread);
    uint32_t await_job(uint32_t seen);
    void work(int thread);

    Job job_{};
    std::unique_ptr<Share[]> shares_;                  // one per thread
    alignas(64) std::atomic<uint32_t> job_number_{0};  // of the current job
    std::atomic<bool> stopping_{false};
    alignas(64) std::atomic<int32_t> unfinished_{0};  // chunks
    alignas(64) std::atomic<int32_t> signal_{0};      // changes when sleepers are to look again
    std::atomic<int32_t> num_sleeping_{0};
    std::vector<std::thread> workers_;
};

}  // namespace pelton
