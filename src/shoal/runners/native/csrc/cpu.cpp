// Which kernels this CPU can run. Compiled for the baseline, like everything but isa.cpp.
#include "model.h"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace shoal {

#if defined(__x86_64__)
namespace {

// Asked of the CPU itself: a compiler's builtins need a part of its runtime library that not every toolchain brings.
struct Cpu {
    unsigned one_c, seven_b, seven_c, seven_d, more_a, state;
    Cpu() {
        unsigned a, b, c, d;
        ask(0, 0, a, b, c, d);
        const unsigned most = a;
        ask(1, 0, a, b, one_c, d);
        state = 0;
        if (one_c >> 27 & 1) {  // the system keeps the state of wide registers
            unsigned high;
            asm volatile("xgetbv" : "=a"(state), "=d"(high) : "c"(0));
        }
        seven_b = seven_c = seven_d = more_a = 0;
        if (most < 7) return;
        ask(7, 0, a, seven_b, seven_c, seven_d);
        if (a >= 1) ask(7, 1, more_a, b, c, d);
    }
    static void ask(unsigned leaf, unsigned sub, unsigned& a, unsigned& b, unsigned& c, unsigned& d) {
        asm volatile("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(leaf), "c"(sub));
    }
    static bool all(unsigned word, std::initializer_list<int> bits) {
        for (int bit : bits)
            if (!(word >> bit & 1)) return false;
        return true;
    }
    bool avx2() const { return (state & 6) == 6 && all(one_c, {12, 28, 29}) && all(seven_b, {5}); }  // fma, avx, f16c
    bool avx512() const {
        return avx2() && (state & 0xe6) == 0xe6 && all(seven_b, {16, 17, 30, 31}) && all(seven_c, {11});
    }  // f, dq, bw, vl; vnni
    bool bf16() const { return all(more_a, {5}); }
    bool avx_vnni() const { return all(more_a, {4}); }
    bool amx() const { return (state >> 17 & 3) == 3 && all(seven_d, {22, 23, 24, 25}); }  // bf16, half, tiles, int8
};

// Linux gives a process its matrix registers when it asks.
bool granted_tiles() {
#if defined(__linux__)
    constexpr long kAsk = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kAsk, kTileData) == 0;
#else
    return false;
#endif
}

}  // namespace
#endif

std::vector<const Kernels*> supported_kernels() {
    std::vector<const Kernels*> out;
#if defined(__x86_64__)
    const Cpu cpu;
    if (cpu.avx512() && cpu.bf16() && cpu.amx() && granted_tiles()) out.push_back(kernels_amx());
    if (cpu.avx512() && cpu.bf16()) out.push_back(kernels_avx512bf16());
    if (cpu.avx512()) out.push_back(kernels_avx512vnni());
    if (cpu.avx2() && cpu.avx_vnni()) out.push_back(kernels_avx2vnni());
    if (cpu.avx2()) out.push_back(kernels_avx2base());
#elif defined(__aarch64__)
#if defined(__APPLE__)
    out.push_back(kernels_neon_dot());  // every Apple CPU since the A11
#elif defined(__linux__)
    if (getauxval(AT_HWCAP2) & (1ul << 13)) out.push_back(kernels_neon_i8mm());
    if (getauxval(AT_HWCAP) & (1ul << 20)) out.push_back(kernels_neon_dot());
#endif
#endif
    out.push_back(kernels_plain());
    return out;
}

const Kernels* choose_kernels(const std::string& isa) {
    std::string known;
    for (const Kernels* kernels : supported_kernels()) {
        if (isa.empty() || isa == "auto" || std::string(kernels->name).rfind(isa, 0) == 0) return kernels;
        known += std::string(" ") + kernels->name;
    }
    throw FormatError("instruction set " + isa + " is not one of this machine:" + known);
}

}  // namespace shoal
