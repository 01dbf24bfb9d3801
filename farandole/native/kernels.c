/* Selection of the vector code for this processor, once at run time. */
#include "kernels.h"

#include <stdatomic.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "core.h"

static atomic_int level_in_use = -1;

#if defined(__x86_64__)
/* Whether the operating system saves the registers of these XCR0 bits. */
static int saves_registers(unsigned wanted)
{
    unsigned low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & wanted) == wanted;
}
#endif

/* Reads CPUID, because __builtin_cpu_supports depends on the compiler's runtime library and returns 0 with zig's. */
int frd_vector_level(void)
{
#if defined(__x86_64__)
    enum { YMM = 0x6, ZMM = 0xe6 };
    const unsigned avx512 = bit_AVX512F | bit_AVX512DQ | bit_AVX512BW | bit_AVX512VL;
    unsigned a, features, more, b, c, d;
    if (!__get_cpuid(1, &a, &b, &features, &d) || !__get_cpuid_count(7, 0, &a, &more, &c, &d)) return FRD_PLAIN;
    const unsigned avx = bit_OSXSAVE | bit_F16C | bit_FMA;
    if ((features & avx) != avx || !(more & bit_AVX2) || !saves_registers(YMM)) return FRD_PLAIN;
    return (more & avx512) == avx512 && saves_registers(ZMM) ? FRD_AVX512 : FRD_AVX2;
#else
    return FRD_PLAIN;
#endif
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
