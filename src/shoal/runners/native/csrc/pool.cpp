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

}  // namespace

int available_cpus() {
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
    int n = int(std::thread::hardware_concurrency());
    return n > 0 ? n : 1;
}

Pool::Pool(int threads) : size_(threads) {
    threads_.reserve(size_t(threads));
    try {
        for (int i = 1; i < threads; i++) threads_.emplace_back([this, i] { work(i); });
    } catch (...) {  // the system gives no more threads: end those that started, then say so
        size_ = int(threads_.size()) + 1;
        stop_ = true;
        job_.fetch_add(1);
        job_.notify_all();
        for (auto& thread : threads_) thread.join();
        throw;
    }
}

Pool::~Pool() {
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

void Pool::work(int id) {
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
