/* For x86 with AVX2, FMA and F16C. */
#if defined(__x86_64__)
#include <immintrin.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

static void widen_f16(const uint16_t *from, float *to, size_t m)
{
    size_t i = 0;
    for (; i + 8 <= m; i += 8) _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const void *)(from + i))));
    for (; i < m; i++) to[i] = _cvtsh_ss(from[i]);
}

static void narrow_f16(const float *from, uint16_t *to, size_t m)
{
    size_t i = 0;
    for (; i + 8 <= m; i += 8)
        _mm_storeu_si128((void *)(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
    for (; i < m; i++) to[i] = _cvtss_sh(from[i], _MM_FROUND_TO_NEAREST_INT);
}

static inline bool pair_f16(const uint16_t *a, const uint16_t *b, float factor, uint16_t *x, uint16_t *y, size_t m)
{
    const __m256 scale = _mm256_set1_ps(factor);
    if (m % 8) return false;
    for (size_t i = 0; i < m; i += 8) {
        const __m256 p = _mm256_cvtph_ps(_mm_loadu_si128((const void *)(a + i)));
        const __m256 q = _mm256_cvtph_ps(_mm_loadu_si128((const void *)(b + i)));
        const __m128i sums = _mm256_cvtps_ph(_mm256_mul_ps(_mm256_add_ps(p, q), scale), _MM_FROUND_TO_NEAREST_INT);
        _mm_storeu_si128((void *)(x + i), sums);
        if (y) _mm_storeu_si128((void *)(y + i), sums);
    }
    return true;
}

/* Returns c + the sums of the products of adjacent int16 values.  Without the asm statement, GCC would first add the
 * products of several inputs, but has too few registers to do so. */
static inline __m256i add_pairs(__m256i a, __m256i b, __m256i c)
{
    c = _mm256_add_epi32(c, _mm256_madd_epi16(a, b));
    __asm__("" : "+x"(c));
    return c;
}

#define F16_PAIR pair_f16
#define F16_TO_F32 widen_f16
#define F32_TO_F16 narrow_f16
#define TABLE frd_reduce_avx2
#define CODECS frd_codecs_avx2
#define INFERENCE frd_inference_avx2
#define LANES 8
#define VECTORS 2
#define MOST_ROWS 6 /* 12 accumulators in 16 registers */
#define SUMS 8
#define FMA(a, b, c) ((vec)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c)))
#define LOAD_INT8(FROM) ((shorts)_mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)(FROM))))
#define PAIRS(a, b, c) ((ints)add_pairs((__m256i)(a), (__m256i)(b), (__m256i)(c)))
#include "kernels.inc"
#include "codecs.inc"
#include "inference.inc"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int not_for_this_processor; /* ISO C requires a declaration in every file */
#endif
