#include "thread_team.h"

#include <sched.h>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace shoal {
namespace {

// Long enough to cover the gap between two steps, short enough to leave the core to others when there is no work.
constexpr int kSpinsBeforeSleep = 4000;
constexpr int kSpinsBeforeYield = 500;

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

constexpr uint64_t kCountMask = 0xffffffffu;

}  // namespace

void ThreadTeam::start(int64_t max_phases) {
    phases_ = std::make_unique<Phase[]>(static_cast<size_t>(max_phases));
    for (int i = 1; i < threads_; ++i) workers_.emplace_back([this, i] { worker(i); });
}

void ThreadTeam::stop() {
    stopping_.store(true);
    ticket_.fetch_add(2);
    ticket_.notify_all();
    for (std::thread& thread : workers_) thread.join();
    workers_.clear();
}

void ThreadTeam::run(PhaseWork& work, int64_t phases) {
    const uint32_t step = ticket_.load(std::memory_order_relaxed) + 1;
    // Every unit of the last step is done, so the only threads still in there are late ones with nothing in hand;
    // they see the new step number in the claim and leave.
    for (int64_t i = 0; i < phases; ++i) {
        Phase& phase = phases_[static_cast<size_t>(i)];
        phase.claim.store(static_cast<uint64_t>(step) << 32);
        phase.done.store(0);
        phase.units.store(static_cast<uint64_t>(work.units(i)));
    }
    work_.store(&work);
    num_phases_.store(phases);
    ticket_.store(step);
    if (threads_ > 1) ticket_.notify_all();
    walk(step, phases, 0);
    ticket_.store(step + 1);
}

void ThreadTeam::walk(uint32_t step, int64_t phases, int thread) {
    PhaseWork& work = *work_.load();
    for (int64_t i = 0; i < phases; ++i) {
        Phase& phase = phases_[static_cast<size_t>(i)];
        const uint64_t units = phase.units.load();
        for (;;) {
            uint64_t claim = phase.claim.load(std::memory_order_acquire);
            if (claim >> 32 != step) return;
            if ((claim & kCountMask) >= units) break;
            // The step number makes the exchange fail if the phase was set up anew since `units` was read.
            if (!phase.claim.compare_exchange_weak(claim, claim + 1, std::memory_order_acq_rel)) continue;
            work.run(i, static_cast<int64_t>(claim & kCountMask), thread);
            phase.done.fetch_add(1, std::memory_order_release);
        }
        for (int spins = 0; phase.done.load(std::memory_order_acquire) < units; ++spins) {
            if (phase.claim.load(std::memory_order_relaxed) >> 32 != step) return;
            if (spins > kSpinsBeforeYield)
                sched_yield();
            else
                relax();
        }
        if (thread == 0) work.phase_done(i);
    }
}

void ThreadTeam::worker(int thread) {
    uint32_t seen = 0;
    for (;;) {
        uint32_t ticket = ticket_.load();
        for (int spins = 0; ticket == seen || ticket % 2 == 0; ++spins) {
            if (stopping_.load(std::memory_order_relaxed)) return;
            if (spins > kSpinsBeforeSleep)
                ticket_.wait(ticket);
            else
                relax();
            ticket = ticket_.load();
        }
        seen = ticket;
        walk(ticket, num_phases_.load(), thread);
    }
}

}  // namespace shoal
