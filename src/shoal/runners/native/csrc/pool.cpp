#include "pool.h"

#if defined(__linux__)
#include <sched.h>
#endif

namespace shoal {
namespace {

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

void stay_on(int place) {
#if defined(__linux__)
    cpu_set_t allowed, one;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
    place %= CPU_COUNT(&allowed);
    int cpu = 0;
    while (!CPU_ISSET(cpu, &allowed) || place-- > 0) cpu++;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    sched_setaffinity(0, sizeof one, &one);
#else
    (void)place;
#endif
}

}  // namespace

int available_cpus() {
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
    int n = int(std::thread::hardware_concurrency());
    return n > 0 ? n : 1;
}

Pool::Pool(int threads, bool pin) : size_(threads) {
    threads_.reserve(size_t(threads));
    try {
        for (int i = 1; i < threads; i++) threads_.emplace_back([this, i, pin] { work(i, pin); });
    } catch (...) {  // the system gives no more threads: end those that started, then say so
        end();
        throw;
    }
}

void Pool::end() {
    stop_ = true;
    job_.fetch_add(1);
    job_.notify_all();
    for (auto& thread : threads_) thread.join();
}

void Pool::run(void (*fn)(void*, int), void* context) {
    fn_ = fn, context_ = context;
    job_.fetch_add(1, std::memory_order_release);
    job_.notify_all();
    fn(context, 0);
    barrier();
}

void Pool::work(int id, bool pin) {
    if (pin) stay_on(id);
    uint32_t seen = 0;
    for (;;) {
        for (int spin = 0; spin < 4000 && job_.load(std::memory_order_acquire) == seen; spin++) relax();
        while (job_.load(std::memory_order_acquire) == seen) job_.wait(seen, std::memory_order_acquire);
        seen++;
        if (stop_.load()) return;
        fn_(context_, id);
        barrier();
    }
}

void Pool::barrier() {
    if (size_ == 1) return;
    const uint32_t turn = turn_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == uint32_t(size_)) {
        arrived_.store(0, std::memory_order_relaxed);
        turn_.fetch_add(1, std::memory_order_release);
        return;
    }
    for (int spin = 0; turn_.load(std::memory_order_acquire) == turn; spin++) {
        if (spin < 4000) relax();
        else std::this_thread::yield();
    }
}

}  // namespace shoal
