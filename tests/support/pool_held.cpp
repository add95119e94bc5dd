// Runs of a pool, one right after the other, whose other thread is held at any instruction by signals, as by a system that gives its
// core to others. Each unit is to run once. Exits 1 where one did not, 2 where a run
// or the pool's end does not end.
#include <pthread.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "pool.h"

using namespace shoal;

constexpr int kUnits = 2, kRunsOfAPool = 1000, kPatience = 20000;

static pthread_t other;
static std::atomic<bool> known, done, holding;

struct Counting : Work {
    std::atomic<int> ran[kUnits] = {}, opened{0};
    std::atomic<bool> good{true};
    int open() override {
        if (opened++ == 0) return kUnits;
        for (auto& each : ran)
            if (each.load() != 1) good = false;
        return 0;
    }
    void unit(int index, int thread) override {
        ran[index]++;
        if (thread == 0) {  // the other thread is to have the last unit, so that it ends the run
            for (int i = 0; i < kPatience && ran[kUnits - 1].load() == 0; i++) {
            }
            return;
        }
        for (std::atomic<int> i{0}; i.load() < 100; i++) {
        }
        if (!known.load()) other = pthread_self(), known = true;
    }
};

static void sleep_for(long nanoseconds) {
    const timespec time = {0, nanoseconds};
    nanosleep(&time, nullptr);
}

static void hold() {
    while (!done.load()) {
        if (known.load() && !holding.exchange(true)) pthread_kill(other, SIGUSR1);  // one at a time, or it would never go on
        sleep_for(5'000);
    }
}

// A new pool each time: one that lost its cores to others for long does with fewer threads.
static int wrong_runs() {
    int wrong = 0;
    known = done = holding = false;
    Pool pool(2, false);
    std::thread holder(hold);
    for (int i = 0; i < kRunsOfAPool; i++) {
        alarm(20);
        Counting work;
        pool.run(work);
        wrong += !work.good.load() || work.opened.load() != 2;
    }
    done = true;
    holder.join();
    return wrong;
}

int main(int, char** argv) {
    const int pools = atoi(argv[1]);
    signal(SIGUSR1, [](int) {
        sleep_for(20'000);
        holding = false;
    });
    signal(SIGALRM, [](int) { _exit(2); });
    int wrong = 0;
    for (int i = 0; i < pools; i++) wrong += wrong_runs();
    printf("%d of %d runs went wrong\n", wrong, pools * kRunsOfAPool);
    return wrong > 0;
}
