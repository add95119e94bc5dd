// Threads that share work: phases, one after the other, of units that are claimed one by one.
#pragma once
#include <atomic>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

namespace shoal {

// How many of the threads to use, from what the last runs lost to other processes. A thread that loses its core inside a unit keeps
// all others at the end of the phase, so that beside one busy process two threads can be slower than one. Two runs in turn
// in which some thread was without a core for a fifth of the time, and one thread goes; after a while it comes back to try, the
// later the more often that failed.
class Company {
  public:
    explicit Company(int most) : most_(most), now_(most) {}
    int threads() const { return now_; }
    void note(
        double seconds,
        double lost);  // of a run: what it took, and the most that one of its threads was without a core inside units

  private:
    static constexpr double kShare = 0.2, kLeast = 1e-4, kFirstRest = 0.25, kLongestRest = 8;
    static constexpr int kProven = 8;  // runs
    int most_, now_, strikes_ = 0, good_ = kProven;
    double rest_ = kFirstRest, rested_ = 0;
};

// What threads share. No phase begins before all units of the one before are done.
class Work {
  public:
    virtual ~Work() = default;
    virtual int
    open() = 0;  // the next phase begins: how many units it has; 0: there is none. Called while no unit runs
    virtual void unit(int index, int thread) = 0;
};

// The caller is thread 0. A phase ends when its units are done: whoever did the last one opens the next. So a thread that has lost
// its core and claimed nothing holds up nobody, and comes too late for nothing but its share: it touches no more than `word_`
// before it has a unit. Threads without a unit spin, for the next phase comes soon, then sleep: on a machine that others use
// too, the one that is waited for may need this very core.
class Pool {
  public:
    Pool(int threads,
         bool pin);  // pin: thread i stays on the i-th CPU this process may use; the caller's is not ours to move
    ~Pool() { end(); }
    Pool(const Pool&) = delete;
    int size() const { return int(workers_.size()); }
    int active() const { return company_.threads(); }  // of the next run
    void run(Work& work);                              // returns when all phases are done

  private:
    struct alignas(64) Worker {
        std::atomic<uint32_t> job{0};
        std::atomic<int64_t> lost{0};  // of this run: nanoseconds without a core inside units
        double own = 0, seen = 0;      // seconds of its CPU time and of the clock when it last looked
        std::thread thread;
    };
    void end();
    void work(int id);
    void take_part(int id);
    bool do_unit(int id);
    void look(Worker& worker, double began, double ended);
    void advance();
    bool idle() const { return uint32_t(word_.load(std::memory_order_acquire)) == 0 && !over_.load(); }
    std::vector<Worker> workers_;  // the first is the caller
    Company company_;
    Work* work_ = nullptr;
    // The number of the phase, and how many of its units nobody has claimed. A claim holds the phase open, so what is read after it is
    // of this phase.
    alignas(64) std::atomic<uint64_t> word_{0};
    alignas(64) std::atomic<int> done_{0};
    int units_ = 0;
    alignas(64) std::atomic<uint32_t> opened_{0};  // for those that sleep
    std::atomic<int> sleepers_{0};
    std::atomic<bool> over_{true}, stop_{false};
};

// Cores this process may use: CPUs of its affinity mask, of one physical core one, and not more than a container's quota. `root` is
// before /proc and /sys, for tests.
int available_cpus(const std::string& root = "");

}  // namespace shoal
