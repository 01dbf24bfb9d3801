/* For x86 with AVX-512 (F, BW, DQ and VL, which Intel's server processors have supported since 2017). */
#if defined(__x86_64__)
#include <immintrin.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,f16c,prefer-vector-width=512")
#endif

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

static void widen_f16(const uint16_t *from, float *to, size_t m)
{
    size_t i = 0;
    for (; i + 16 <= m; i += 16) _mm512_storeu_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256((const void *)(from + i))));
    for (; i < m; i++) to[i] = _cvtsh_ss(from[i]);
}

static void narrow_f16(const float *from, uint16_t *to, size_t m)
{
    size_t i = 0;
    for (; i + 16 <= m; i += 16)
        _mm256_storeu_si256((void *)(to + i), _mm512_cvtps_ph(_mm512_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
    for (; i < m; i++) to[i] = _cvtss_sh(from[i], _MM_FROUND_TO_NEAREST_INT);
}

static inline bool pair_f16(const uint16_t *a, const uint16_t *b, float factor, uint16_t *x, uint16_t *y, size_t m)
{
    const __m512 scale = _mm512_set1_ps(factor);
    if (m % 16) return false;
    for (size_t i = 0; i < m; i += 16) {
        const __m512 p = _mm512_cvtph_ps(_mm256_loadu_si256((const void *)(a + i)));
        const __m512 q = _mm512_cvtph_ps(_mm256_loadu_si256((const void *)(b + i)));
        const __m256i sums = _mm512_cvtps_ph(_mm512_mul_ps(_mm512_add_ps(p, q), scale), _MM_FROUND_TO_NEAREST_INT);
        _mm256_storeu_si256((void *)(x + i), sums);
        if (y) _mm256_storeu_si256((void *)(y + i), sums);
    }
    return true;
}

/* Returns c + the sums of the products of adjacent int16 values.  Without the asm statement, GCC would first add the
 * products of several inputs, but has too few registers to do so. */
static inline __m512i add_pairs(__m512i a, __m512i b, __m512i c)
{
    c = _mm512_add_epi32(c, _mm512_madd_epi16(a, b));
    __asm__("" : "+v"(c));
    return c;
}

#define F16_PAIR pair_f16
#define F16_TO_F32 widen_f16
#define F32_TO_F16 narrow_f16
#define TABLE frd_reduce_avx512
#define CODECS frd_codecs_avx512
#define INFERENCE frd_inference_avx512
#define LANES 16
#define VECTORS 2
#define MOST_ROWS 12 /* 24 accumulators in 32 registers */
#define SUMS 16
#define FMA(a, b, c) ((vec)_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c)))
#define LOAD_INT8(FROM) ((shorts)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const void *)(FROM))))
#define PAIRS(a, b, c) ((ints)add_pairs((__m512i)(a), (__m512i)(b), (__m512i)(c)))
#include "kernels.inc"
#include "codecs.inc"
#include "inference.inc"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int not_for_this_processor; /* ISO C requires a declaration in every file */
#endif
