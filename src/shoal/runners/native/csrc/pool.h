// Threads that run one function together, with barriers inside it and units of work claimed from a counter.
#pragma once
#include <atomic>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

namespace shoal {

// How many of the threads to use, from what the last runs lost to other processes. A thread that loses its core keeps all others
// at the next barrier, so that beside one busy process two threads can be several times slower than one. Two runs in turn
// in which some thread was without a core for a fifth of the time, and one thread goes; after a while it comes back to try, the
// later the more often that failed.
class Company {
  public:
    explicit Company(int most) : most_(most), now_(most) {}
    int threads() const { return now_; }
    void note(double seconds,
              double lost);  // of a run: what it took, and the most that one of its threads was without a core

  private:
    static constexpr double kShare = 0.2, kLeast = 1e-4, kFirstRest = 0.25, kLongestRest = 8;
    static constexpr int kProven = 8;  // runs
    int most_, now_, strikes_ = 0, good_ = kProven;
    double rest_ = kFirstRest, rested_ = 0;
};

// The caller is thread 0. Between runs the others spin for some 70 us (the next step of a decoding loop comes soon), then
// sleep in the kernel. At a barrier they spin, then yield: on a machine that others use too, the one that is waited
// for may need this very core.
class Pool {
  public:
    Pool(int threads,
         bool pin);  // pin: thread i stays on the i-th CPU this process may use; the caller's is not ours to move
    ~Pool() { end(); }
    Pool(const Pool&) = delete;
    int size() const { return int(workers_.size()); }
    int active() const { return company_.threads(); }  // of the next run
    void run(void (*fn)(void*, int), void* context);   // returns when all that take part have returned
    void barrier();

  private:
    struct alignas(64) Worker {
        std::atomic<uint32_t> job{0};
        double lost = 0;  // of the last run: seconds without a core
        std::thread thread;
    };
    void end();
    void work(int id, bool pin);
    void take_part(int id);
    std::vector<Worker> workers_;  // the first is the caller
    Company company_;
    int taking_part_ = 1;
    double started_ = 0;
    alignas(64) std::atomic<uint32_t> arrived_{0};
    alignas(64) std::atomic<uint32_t> turn_{0};
    std::atomic<bool> stop_{false};
    void (*fn_)(void*, int) = nullptr;
    void* context_ = nullptr;
};

// Cores this process may use: CPUs of its affinity mask, of one physical core one, and not more than a container's quota. `root` is
// before /proc and /sys, for tests.
int available_cpus(const std::string& root = "");

}  // namespace shoal
