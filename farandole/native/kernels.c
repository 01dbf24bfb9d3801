/* Selection of the vector code for this processor, once at run time. */
#include "kernels.h"

#include <stdatomic.h>

#include "core.h"

static atomic_int level_in_use = -1;

int frd_vector_level(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return FRD_AVX512;
    if (__builtin_cpu_supports("avx2")) return FRD_AVX2; /* implies F16C, which not every compiler can query */
#endif
    return FRD_PLAIN;
}

int frd_use_vector_level(int level)
{
    const int best = frd_vector_level();
    const int used = level < best ? level : best;
    atomic_store(&level_in_use, used);
    return used;
}

int frd_vector_level_in_use(void)
{
    const int level = atomic_load_explicit(&level_in_use, memory_order_relaxed);
    return level < 0 ? frd_use_vector_level(FRD_AVX512) : level;
}

frd_reduce_fn frd_reduce_kernel(int type, int op)
{
    const int code = type & 0xff;
    if (code >= FRD_REDUCIBLE_TYPES || op < 0 || op >= FRD_REDUCE_OPS) return NULL;
#if defined(__x86_64__)
    const int level = frd_vector_level_in_use();
    if (level == FRD_AVX512) return frd_reduce_avx512[code][op];
    if (level == FRD_AVX2) return frd_reduce_avx2[code][op];
#endif
    return frd_reduce_plain[code][op];
}

int frd_combine(void *out, const void *a, const void *b, size_t count, int type, int op)
{
    const frd_reduce_fn kernel = frd_reduce_kernel(type, op);
    if (!kernel) return FRD_UNSUPPORTED;
    const void *sources[2] = {a, b};
    kernel(&out, 1, sources, 2, count);
    return FRD_OK;
}
