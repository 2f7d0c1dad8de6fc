/* Selection of the targets that were compiled and that this machine can run. */
#include "permille.h"

EXPORT int permille_abi(void) { return PERMILLE_ABI; }

/* Return 1 if the path was compiled and this processor supports it, else 0. Paths: 0 scalar, 1 avx2, 2 avx512, 3 neon.
 * F16C is not checked, because every processor with AVX2 has it, and not every compiler knows its name. */
EXPORT int permille_has(int path) {
    if (path == 0) return 1;
#if defined(__x86_64__) || defined(__i386__)
    __builtin_cpu_init();
#ifdef WITH_AVX2
    if (path == 1)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
#ifdef WITH_AVX512
    if (path == 2)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
#endif
#ifdef WITH_NEON
    if (path == 3) return 1;
#endif
    return 0;
}
