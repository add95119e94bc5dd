// Threads that run one function together, with barriers inside it and units of work claimed from a counter.
#pragma once
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace shoal {

// The caller is thread 0. Between runs the others spin for some 70 us (the next step of a decoding loop comes soon), then
// sleep in the kernel. At a barrier they spin, then yield: on a machine that others use too, the one that is waited
// for may need this very core.
class Pool {
  public:
    Pool(int threads, bool pin);  // pin: thread i stays on the i-th CPU this process may use; the caller's is not ours to move
    ~Pool() { end(); }
    Pool(const Pool&) = delete;
    int size() const { return size_; }
    void run(void (*fn)(void*, int), void* context);  // returns when all have returned
    void barrier();

  private:
    void end();
    void work(int id, bool pin);
    int size_;
    alignas(64) std::atomic<uint32_t> job_{0};
    alignas(64) std::atomic<uint32_t> arrived_{0};
    alignas(64) std::atomic<uint32_t> turn_{0};
    std::atomic<bool> stop_{false};
    void (*fn_)(void*, int) = nullptr;
    void* context_ = nullptr;
    std::vector<std::thread> threads_;
};

int available_cpus();

}  // namespace shoal
