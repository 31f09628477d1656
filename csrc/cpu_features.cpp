#include "cpu_features.h"

#if defined(SHOAL_X86)
#include <cpuid.h>
#endif
#if defined(SHOAL_X86) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace shoal {

// The compiler's run-time checks include the operating system's support for the wide registers.
#if defined(SHOAL_X86)
bool cpu_has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool cpu_has_avx512() {
    return cpu_has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
}
// The kernel gives the tile registers to a process that asks; it refuses where a thread's alternative signal stack is
// too small for them.
bool cpu_has_amx() {
#if defined(__linux__)
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!cpu_has_avx512() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    const bool tiles = (d >> 24) & 1, int8 = (d >> 25) & 1, bf16 = (d >> 22) & 1;
    return tiles && int8 && bf16 && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}
#else
bool cpu_has_amx() { return false; }
bool cpu_has_avx2() { return false; }
bool cpu_has_avx512() { return false; }
#endif

}  // namespace shoal
