// Which kernels this CPU can run. Compiled for the baseline, like everything but isa.cpp.
#include "model.h"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace shoal {

std::vector<const Kernels*> supported_kernels() {
    std::vector<const Kernels*> out;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
    if (avx512 && __builtin_cpu_supports("avx512bf16")) out.push_back(kernels_avx512bf16());
    if (avx512) out.push_back(kernels_avx512vnni());
    // AVX-VNNI is CPUID leaf 7, subleaf 1, EAX bit 4; older compilers have no name for it.
    unsigned a = 0, b = 0, c = 0, d = 0;
    asm volatile("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(7), "c"(1));
    if (avx2 && (a >> 4 & 1)) out.push_back(kernels_avx2vnni());
    if (avx2) out.push_back(kernels_avx2base());
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
