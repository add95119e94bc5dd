#include "pool.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <ctime>
#include <fstream>
#include <set>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace shoal {
namespace {

constexpr int kSpins = 4000;      // some 70 us
constexpr double kSlow = 300e-6;  // seconds: a unit takes some ten

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

std::vector<int> allowed_cpus() {
    std::vector<int> out;
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0)
        for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
            if (CPU_ISSET(cpu, &set)) out.push_back(cpu);
#endif
    return out;
}

// By who starts the thread, so that it is there before anything runs.
void keep_on(std::thread& thread, int place) {
#if defined(__linux__)
    const std::vector<int> cpus = allowed_cpus();
    if (cpus.empty()) return;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(size_t(cpus[size_t(place) % cpus.size()]), &one);
    pthread_setaffinity_np(thread.native_handle(), sizeof one, &one);
#else
    (void)thread, (void)place;
#endif
}

std::string first_line(const std::string& path) {
    std::ifstream file(path);
    std::string line;
    std::getline(file, line);
    return line;
}

// "max 100000" and "200000 100000" of version 2; version 1 has a file for each number. 0: no limit.
double quota_at(const std::string& folder) {
    std::string quota = first_line(folder + "/cpu.max"), period;
    if (const size_t space = quota.find(' '); space != std::string::npos)
        period = quota.substr(space + 1), quota.resize(space);
    if (quota.empty())
        quota = first_line(folder + "/cpu.cfs_quota_us"), period = first_line(folder + "/cpu.cfs_period_us");
    const double a = std::atof(quota.c_str()), b = std::atof(period.c_str());
    return a > 0 && b > 0 ? a / b : 0;
}

// The least quota of this process's groups and those above them.
double quota(const std::string& root) {
    double least = 0;
    const auto take = [&](double q) { least = q > 0 && (least == 0 || q < least) ? q : least; };
    std::ifstream groups(root + "/proc/self/cgroup");
    for (std::string line; std::getline(groups, line);) {  // "0::/path", or "4:cpu,cpuacct:/path"
        const size_t first = line.find(':'), second = line.find(':', first + 1);
        if (second == std::string::npos) continue;
        const std::string controllers = line.substr(first + 1, second - first - 1);
        if (!controllers.empty() && ("," + controllers + ",").find(",cpu,") == std::string::npos) continue;
        const std::string mount = root + "/sys/fs/cgroup" + (controllers.empty() ? "" : "/cpu");
        for (std::string path = line.substr(second + 1);; path.resize(path.rfind('/'))) {
            take(quota_at(mount + path));
            if (path.find('/') == std::string::npos) break;
        }
    }
    return least;
}

double own_seconds() {
    timespec t{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return double(t.tv_sec) + double(t.tv_nsec) * 1e-9;
}

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace

int available_cpus(const std::string& root) {
    std::set<std::string> cores;
    for (int cpu : allowed_cpus()) {
        const std::string siblings =
            first_line(root + "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list");
        cores.insert(siblings.empty() ? std::to_string(cpu) : siblings);
    }
    int n = cores.empty() ? int(std::thread::hardware_concurrency()) : int(cores.size());
    if (const double most = quota(root); most > 0) n = std::min(n, int(most));
    return std::max(n, 1);
}

void Company::note(double seconds, double lost) {
    rested_ += seconds;
    const bool strike = now_ > 1 && lost > kLeast && lost > kShare * seconds;
    strikes_ = strike ? strikes_ + 1 : 0;
    if (strikes_ >= (good_ < kProven ? 1 : 2)) {
        if (good_ < kProven) rest_ = std::min(rest_ * 2, kLongestRest);  // it had just come back
        now_--, strikes_ = 0, rested_ = 0, good_ = kProven;
        return;
    }
    if (strike) return;
    if (good_ < kProven && ++good_ == kProven) rest_ = kFirstRest;
    if (now_ < most_ && good_ == kProven && rested_ >= rest_) now_++, rested_ = 0, good_ = 0;
}

Pool::Pool(int threads, bool pin) : workers_(size_t(threads)), company_(threads) {
    try {
        for (int i = 1; i < threads; i++) {
            workers_[size_t(i)].thread = std::thread([this, i] { work(i); });
            if (pin) keep_on(workers_[size_t(i)].thread, i);
        }
    } catch (...) {  // the system gives no more threads: end those that started, then say so
        end();
        throw;
    }
}

void Pool::end() {
    stop_ = true;
    for (Worker& worker : workers_) {
        worker.job.fetch_add(1);
        worker.job.notify_all();
        if (worker.thread.joinable()) worker.thread.join();
    }
}

void Pool::run(Work& work) {
    work_ = &work;
    const int taking_part = company_.threads();
    const double started = seconds();
    for (Worker& worker : workers_) worker.lost.store(0, std::memory_order_relaxed);
    over_ = false;
    advance();
    for (int i = 1; i < taking_part; i++) {
        workers_[size_t(i)].job.fetch_add(1, std::memory_order_release);
        workers_[size_t(i)].job.notify_one();
    }
    take_part(0);
    int64_t lost = 0;
    for (Worker& worker : workers_) lost = std::max(lost, worker.lost.load(std::memory_order_relaxed));
    company_.note(seconds() - started, double(lost) * 1e-9);
}

// The next phase, by whoever did the last unit of the one before. Where there is none, `over_` is the last that is written of this run:
// its caller may return and begin another run before this thread goes on.
void Pool::advance() {
    if (const int units = work_->open(); units > 0) {
        units_ = units;
        done_.store(0, std::memory_order_relaxed);
        const uint64_t next = (word_.load(std::memory_order_relaxed) >> 32) + 1;
        word_.store(next << 32 | uint64_t(units), std::memory_order_release);
    } else {
        over_ = true;
    }
    opened_.fetch_add(1);
    if (sleepers_.load() > 0) opened_.notify_all();
}

// False: all units of this phase are claimed.
bool Pool::do_unit(int id) {
    uint64_t word = word_.load(std::memory_order_acquire);
    do {
        if (uint32_t(word) == 0) return false;
    } while (!word_.compare_exchange_weak(word, word - 1, std::memory_order_acq_rel, std::memory_order_acquire));
    const int units = units_;
    const double began = seconds();
    work_->unit(units - int(uint32_t(word)), id);
    if (const double ended = seconds(); ended - began > kSlow) look(workers_[size_t(id)], began, ended);
    if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == units) advance();
    return true;
}

// After a unit that took long: did it work, or wait for a core? Since the last look the thread may have lost it elsewhere too.
void Pool::look(Worker& worker, double began, double ended) {
    const double own = own_seconds(), away = (ended - worker.seen) - (own - worker.own);
    worker.seen = ended, worker.own = own;
    const double lost = std::min(away, ended - began);
    if (lost > 0) worker.lost.fetch_add(int64_t(lost * 1e9), std::memory_order_relaxed);
}

void Pool::take_part(int id) {
    Worker& worker = workers_[size_t(id)];
    worker.seen = seconds(), worker.own = own_seconds();
    for (;;) {
        while (do_unit(id)) {
        }
        for (int spin = 0; spin < kSpins && idle(); spin++) relax();
        while (idle()) {
            const uint32_t opened = opened_.load();
            sleepers_.fetch_add(1);
            const double asleep = seconds();
            if (idle()) opened_.wait(opened);
            worker.seen += seconds() - asleep;
            sleepers_.fetch_sub(1);
        }
        if (over_.load()) return;
    }
}

void Pool::work(int id) {
    std::atomic<uint32_t>& job = workers_[size_t(id)].job;
    for (uint32_t seen = 0;;) {
        for (int spin = 0; spin < kSpins && job.load(std::memory_order_acquire) == seen; spin++) relax();
        while (job.load(std::memory_order_acquire) == seen) job.wait(seen, std::memory_order_acquire);
        seen = job.load(std::memory_order_acquire);  // first: neither a run nor the end that comes meanwhile is missed
        if (stop_.load()) return;
        take_part(id);
    }
}

}  // namespace shoal
