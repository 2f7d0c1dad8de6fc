/* Common names for AVX-512, AVX2 and NEON. V is a register of VB bytes. Shuffles and zips stay within 16 bytes. */
#ifndef PERMILLE_VECTOR_H
#define PERMILLE_VECTOR_H

#if defined(PATH_AVX512)
#include <immintrin.h>
#define VB 64
typedef __m512i V;
typedef __m512 F;
#define v_load(p) _mm512_loadu_si512((const void *)(p))
#define v_store(p, v) _mm512_storeu_si512((void *)(p), v)
#define v_set64(x) _mm512_set1_epi64((long long)(x))
#define v_set8(x) _mm512_set1_epi8((char)(x))
#define v_table(p) _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(p)))
#define v_xor _mm512_xor_si512
#define v_and _mm512_and_si512
#define v_add16 _mm512_add_epi16
#define v_mul32 _mm512_mul_epu32
#define v_srl64(v, n) _mm512_srli_epi64(v, n)
#define v_srl16(v, n) _mm512_srli_epi16(v, n)
#define v_sll16(v, n) _mm512_slli_epi16(v, n)
#define v_shuffle _mm512_shuffle_epi8
#define v_ziplo8 _mm512_unpacklo_epi8
#define v_ziphi8 _mm512_unpackhi_epi8
#define v_join(low, high) _mm512_mask_blend_epi32(0xaaaa, low, _mm512_slli_epi64(high, 32))
#elif defined(PATH_AVX2)
#include <immintrin.h>
#define VB 32
typedef __m256i V;
typedef __m256 F;
#define v_load(p) _mm256_loadu_si256((const __m256i *)(p))
#define v_store(p, v) _mm256_storeu_si256((__m256i *)(p), v)
#define v_set64(x) _mm256_set1_epi64x((long long)(x))
#define v_set8(x) _mm256_set1_epi8((char)(x))
#define v_table(p) _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(p)))
#define v_xor _mm256_xor_si256
#define v_and _mm256_and_si256
#define v_add16 _mm256_add_epi16
#define v_mul32 _mm256_mul_epu32
#define v_srl64(v, n) _mm256_srli_epi64(v, n)
#define v_srl16(v, n) _mm256_srli_epi16(v, n)
#define v_sll16(v, n) _mm256_slli_epi16(v, n)
#define v_shuffle _mm256_shuffle_epi8
#define v_ziplo8 _mm256_unpacklo_epi8
#define v_ziphi8 _mm256_unpackhi_epi8
#define v_join(low, high) _mm256_blend_epi32(low, _mm256_slli_epi64(high, 32), 0xaa)
#elif defined(PATH_NEON)
#include <arm_neon.h>
#define VB 16
typedef uint64x2_t V;
typedef float32x4_t F;
#define v_as8 vreinterpretq_u8_u64
#define v_as16 vreinterpretq_u16_u64
#define v_of8 vreinterpretq_u64_u8
#define v_of16 vreinterpretq_u64_u16
#define v_load(p) v_of8(vld1q_u8((const uint8_t *)(p)))
#define v_store(p, v) vst1q_u8((uint8_t *)(p), v_as8(v))
#define v_set64(x) vdupq_n_u64((uint64_t)(x))
#define v_set8(x) v_of8(vdupq_n_u8((uint8_t)(x)))
#define v_table(p) v_load(p)
#define v_xor veorq_u64
#define v_and vandq_u64
#define v_add16(a, b) v_of16(vaddq_u16(v_as16(a), v_as16(b)))
#define v_mul32(a, b) vmull_u32(vmovn_u64(a), vmovn_u64(b))
#define v_srl64(v, n) vshrq_n_u64(v, n)
#define v_srl16(v, n) v_of16(vshrq_n_u16(v_as16(v), n))
#define v_sll16(v, n) v_of16(vshlq_n_u16(v_as16(v), n))
#define v_shuffle(table, index) v_of8(vqtbl1q_u8(v_as8(table), v_as8(index)))
#define v_ziplo8(a, b) v_of8(vzip1q_u8(v_as8(a), v_as8(b)))
#define v_ziphi8(a, b) v_of8(vzip2q_u8(v_as8(a), v_as8(b)))
#define v_join(low, high) vsliq_n_u64(low, high, 32)
#endif

#endif
