/* Definitions that all kernels share. Each .inc is compiled once for every target (build.py). FN(name) is
 * name_<target>.
 *
 * No kernel allocates memory, keeps state or reads the clock. The Python modules beside this folder check all
 * arguments. Where a comment says exact, the compiler must not contract or reassociate operations, so build.py
 * passes -ffp-contract=off and never -ffast-math.
 */
#ifndef PERMILLE_H
#define PERMILLE_H

#include <stdint.h>
#include <string.h>

#ifndef PERMILLE_ABI
#define PERMILLE_ABI 0 /* build.py passes the number of these sources */
#endif

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the kernels are written for little-endian machines; numpy does their work elsewhere"
#endif

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

#define JOIN2(a, b) a##_##b
#define JOIN(a, b) JOIN2(a, b)
#define FN(name) JOIN(name, TARGET)
#define INLINE static inline __attribute__((always_inline, unused))

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

#endif
