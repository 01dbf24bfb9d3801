/* Element-wise reduction of several sources into one or several destinations. */
#ifndef FARANDOLE_KERNELS_H
#define FARANDOLE_KERNELS_H

#include <stddef.h>

/* dst[k][i] = src[0][i] op src[1][i] op ... op src[nsrc-1][i], always in this order, so that the result
 * does not depend on the rank that computes it.  A destination may be one of the sources.  For FRD_AVG the sum is
 * divided by nsrc.  Destinations after the first are assumed to be in another core's cache.  16-bit floats are
 * accumulated in fp32 and rounded once. */
typedef void (*frd_reduce_fn)(void *const *dst, int ndst, const void *const *src, int nsrc, size_t count);

/* One table per vector level; NULL if an operation is undefined for a type. */
typedef frd_reduce_fn frd_reduce_table[10][8];
extern const frd_reduce_table frd_reduce_plain;
#if defined(__x86_64__)
extern const frd_reduce_table frd_reduce_avx2;
extern const frd_reduce_table frd_reduce_avx512;
#endif

/* Prefetches cache lines that will be read and then written.  Each line moves from another core only once, because it
 * is prefetched with ownership. */
static inline void claim_lines(const void *start, size_t bytes)
{
    for (size_t i = 0; i < bytes; i += 64) {
#if defined(__x86_64__)
        __asm__ __volatile__("prefetchw %0" : : "m"(((const char *)start)[i]));
#else
        __builtin_prefetch((const char *)start + i, 1);
#endif
    }
}

frd_reduce_fn frd_reduce_kernel(int type, int op);
int frd_vector_level_in_use(void);

#endif
