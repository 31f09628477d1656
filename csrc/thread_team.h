// A persistent team of threads that works through phases.
//
// A phase is a number of independent units; a step is a list of phases, each starting when the one before is done.
// Units are claimed one at a time, so a thread that the operating system took off its core delays only the unit it
// holds. A phase is over when all its units are done, not when all threads have arrived: a late thread finds the
// phase's units gone and walks on. Claims carry the step's number, so a thread that slept through a whole step
// cannot take work from the next one by mistake, and nobody ever waits for it.
//
// Between steps threads spin briefly, then sleep; while waiting for others' last units they spin, then yield.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace shoal {

class PhaseWork {
  public:
    virtual ~PhaseWork() = default;
    virtual int64_t units(int64_t phase) const = 0;
    virtual void run(int64_t phase, int64_t unit, int thread) = 0;
    virtual void phase_done(int64_t) {}  // on the calling thread
};

class ThreadTeam {
  public:
    // `threads` includes the caller of `run`.
    explicit ThreadTeam(int threads) : threads_(threads) {}
    ~ThreadTeam() { stop(); }
    ThreadTeam(const ThreadTeam&) = delete;
    ThreadTeam& operator=(const ThreadTeam&) = delete;

    void start(int64_t max_phases);
    void stop();
    int size() const { return threads_; }

    // Runs all phases of `work`; returns when the last is done. One caller at a time.
    void run(PhaseWork& work, int64_t phases);

  private:
    struct alignas(64) Phase {
        std::atomic<uint64_t> claim{0};  // step number << 32 | units claimed
        alignas(64) std::atomic<uint64_t> done{0};
        std::atomic<uint64_t> units{0};
    };

    void worker(int thread);
    void walk(uint32_t step, int64_t phases, int thread);

    const int threads_;
    std::unique_ptr<Phase[]> phases_;
    std::vector<std::thread> workers_;
    std::atomic<PhaseWork*> work_{nullptr};
    std::atomic<int64_t> num_phases_{0};
    // Even: idle; odd: a step is running. Workers wait on it.
    alignas(64) std::atomic<uint32_t> ticket_{0};
    std::atomic<bool> stopping_{false};
};

}  // namespace shoal
