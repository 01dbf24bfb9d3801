/* Products and attention for generation, on several threads. */
#include "inference.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "core.h"
#include "internal.h"
#include "kernels.h"

static const struct frd_inference *kernels(void)
{
#if defined(__x86_64__)
    const int level = frd_vector_level_in_use();
    if (level == FRD_AVX512) return &frd_inference_avx512;
    if (level == FRD_AVX2) return &frd_inference_avx2;
#endif
    return &frd_inference_plain;
}

/* ---- threads ---- */

enum { MOST_THREADS = 256, SPINS = 4000 };

struct work {
    void (*run)(const void *task, size_t number, void *scratch);
    const void *task;
    size_t count, scratch_bytes;
    atomic_size_t next;
    atomic_int failed;
};

/* Helpers wait for a new round, and the caller for the helpers: first spinning for some microseconds and then asleep. */
static struct {
    pthread_mutex_t busy, lock;
    pthread_cond_t changed, done;
    atomic_ulong round;
    atomic_int active;   /* helpers that work in this round */
    int helpers, wanted; /* created helpers, and those that this round can use */
    struct work *work;
} pool = {.busy = PTHREAD_MUTEX_INITIALIZER,
          .lock = PTHREAD_MUTEX_INITIALIZER,
          .changed = PTHREAD_COND_INITIALIZER,
          .done = PTHREAD_COND_INITIALIZER};

static void drain(struct work *work)
{
    void *scratch = work->scratch_bytes ? malloc(work->scratch_bytes) : NULL;
    if (work->scratch_bytes && !scratch) {
        atomic_store(&work->failed, 1);
        return;
    }
    for (size_t number; (number = atomic_fetch_add(&work->next, 1)) < work->count;) work->run(work->task, number, scratch);
    free(scratch);
}

static void *helper(void *argument)
{
    const int own = (int)(intptr_t)argument;
    unsigned long seen = 0;
    for (;;) {
        for (int spin = 0; spin < SPINS && atomic_load_explicit(&pool.round, memory_order_acquire) == seen; spin++) relax();
        pthread_mutex_lock(&pool.lock);
        while (atomic_load(&pool.round) == seen) pthread_cond_wait(&pool.changed, &pool.lock);
        seen = atomic_load(&pool.round);
        struct work *work = own < pool.wanted ? pool.work : NULL;
        if (work) atomic_fetch_add(&pool.active, 1);
        pthread_mutex_unlock(&pool.lock);
        if (!work) continue;
        drain(work);
        pthread_mutex_lock(&pool.lock);
        if (atomic_fetch_sub(&pool.active, 1) == 1) pthread_cond_signal(&pool.done);
        pthread_mutex_unlock(&pool.lock);
    }
    return NULL;
}

/* A forked child has no helpers. */
static void forget_helpers(void)
{
    pthread_mutex_init(&pool.busy, NULL);
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.changed, NULL);
    pthread_cond_init(&pool.done, NULL);
    pool.helpers = pool.wanted = 0;
    atomic_store(&pool.active, 0);
    pool.work = NULL;
}

static int run(struct work *work, int threads)
{
    if ((size_t)threads > work->count) threads = (int)work->count;
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    if (threads < 2 || pthread_mutex_trylock(&pool.busy)) {
        drain(work);
        return atomic_load(&work->failed) ? FRD_NO_MEMORY : FRD_OK;
    }
    pthread_mutex_lock(&pool.lock);
    static int registered;
    if (!registered) registered = !pthread_atfork(NULL, NULL, forget_helpers);
    while (pool.helpers < threads - 1) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, helper, (void *)(intptr_t)pool.helpers)) break;
        pthread_detach(thread);
        pool.helpers++;
    }
    pool.work = work;
    pool.wanted = threads - 1;
    atomic_fetch_add(&pool.round, 1);
    pthread_cond_broadcast(&pool.changed);
    pthread_mutex_unlock(&pool.lock);
    drain(work);
    for (int spin = 0; spin < SPINS && atomic_load_explicit(&pool.active, memory_order_acquire); spin++) relax();
    pthread_mutex_lock(&pool.lock);
    pool.work = NULL; /* a helper that wakes up late finds no work */
    while (atomic_load(&pool.active)) pthread_cond_wait(&pool.done, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
    pthread_mutex_unlock(&pool.busy);
    return atomic_load(&work->failed) && atomic_load(&work->next) < work->count ? FRD_NO_MEMORY : FRD_OK;
}

/* ---- products ---- */

static size_t padded(size_t outputs)
{
    return (outputs + FRD_PANEL - 1) / FRD_PANEL * FRD_PANEL;
}

static const size_t weight_size[] = {[FRD_WEIGHTS_F32] = 4, [FRD_WEIGHTS_BF16] = 2, [FRD_WEIGHTS_INT8] = 1};

size_t frd_packed_size(size_t outputs, size_t inputs, int type)
{
    return padded(outputs) * inputs * weight_size[type];
}

#define PACK(TYPE)                                                                                                     \
    static void pack_##TYPE(TYPE *packed, const TYPE *weight, size_t outputs, size_t inputs)                           \
    {                                                                                                                  \
        for (size_t first = 0; first < outputs; first += FRD_PANEL)                                                    \
            for (size_t k = 0; k < inputs; k++)                                                                        \
                for (size_t output = first; output < first + FRD_PANEL; output++)                                      \
                    *packed++ = output < outputs ? weight[output * inputs + k] : (TYPE)0;                              \
    }

PACK(uint32_t)
PACK(uint16_t)
PACK(int8_t)

void frd_pack(void *packed, const void *weight, size_t outputs, size_t inputs, int type)
{
    if (type == FRD_WEIGHTS_F32) pack_uint32_t(packed, weight, outputs, inputs);
    else if (type == FRD_WEIGHTS_BF16) pack_uint16_t(packed, weight, outputs, inputs);
    else pack_int8_t(packed, weight, outputs, inputs);
}

static void linear_part(const void *task, size_t number, void *scratch)
{
    (void)scratch;
    kernels()->linear(task, number);
}

int frd_linear(float *out, const float *x, const void *packed, const float *scales, const float *bias, size_t rows,
               size_t inputs, size_t outputs, int type, int threads)
{
    const struct frd_linear_task task = {out, x, packed, scales, bias, rows, inputs, outputs, type};
    struct work work = {.run = linear_part, .task = &task, .count = padded(outputs) / FRD_PANEL};
    return rows ? run(&work, threads) : FRD_OK;
}

/* ---- elements ---- */

void frd_rms_norm(void *out, const void *x, const void *weight, size_t rows, size_t width, float epsilon, int is_bf16)
{
    kernels()->norm[is_bf16](&(struct frd_norm_task){out, x, weight, rows, width, epsilon});
}

void frd_swiglu(void *out, const void *x, size_t rows, size_t width, int is_bf16)
{
    kernels()->swiglu[is_bf16](out, x, rows, width);
}

void frd_rotate(void *out, const void *x, const void *cosine, const void *sine, size_t rows, size_t heads, size_t width,
                int64_t row_stride, int64_t head_stride, int is_bf16)
{
    const struct frd_rotate_task task = {out, x, cosine, sine, rows, heads, width, row_stride, head_stride};
    kernels()->rotate[is_bf16](&task);
}

/* ---- attention ---- */

static void attend_part(const void *task, size_t number, void *scratch)
{
    kernels()->attend(task, number, scratch);
}

int frd_attend(float *out, const float *query, const void *keys, const void *values, const int32_t *table,
               const int64_t *positions, size_t queries, size_t heads, size_t kv_heads, size_t width, size_t value_width,
               size_t block_length, size_t table_width, int64_t query_stride, int64_t head_stride, int64_t window,
               float scale, int is_bf16, int threads)
{
    const struct frd_attend_task task = {
        .out = out, .query = query, .keys = keys, .values = values, .table = table, .positions = positions,
        .queries = queries, .heads = heads, .kv_heads = kv_heads, .width = width, .value_width = value_width,
        .block_length = block_length, .table_width = table_width, .query_stride = query_stride,
        .head_stride = head_stride, .window = window, .scale = scale, .is_bf16 = is_bf16,
    };
    int64_t longest = 0;
    for (size_t i = 0; i < queries; i++) longest = positions[i] > longest ? positions[i] : longest;
    const size_t group = 4; /* as in inference.inc */
    const size_t stride = ((size_t)longest + 1 + 2 * FRD_TILE * 4) / 64 * 64 + 64;
    struct work work = {.run = attend_part,
                        .task = &task,
                        .count = queries * kv_heads,
                        .scratch_bytes = group * stride * sizeof(float)};
    return queries ? run(&work, threads) : FRD_OK;
}

/* ---- storage ---- */

#define STORE(TYPE)                                                                                                    \
    static void store_##TYPE(TYPE *to_key, TYPE *to_value, const TYPE *key, const TYPE *value, size_t width,           \
                             size_t value_width)                                                                       \
    {                                                                                                                  \
        for (size_t d = 0; d < width; d++) to_key[d * FRD_TILE] = key[d];                                              \
        memcpy(to_value, value, value_width * sizeof *value);                                                          \
    }

STORE(uint32_t)
STORE(uint16_t)

void frd_store(void *keys, void *values, const void *key, const void *value, const int32_t *table,
               const int64_t *positions, size_t rows, size_t kv_heads, size_t width, size_t value_width,
               size_t block_length, size_t table_width, const int64_t strides[4], int is_bf16)
{
    for (size_t row = 0; row < rows; row++) {
        const size_t at = (size_t)positions[row], offset = at % block_length;
        const size_t block = (size_t)table[row * table_width + at / block_length];
        for (size_t head = 0; head < kv_heads; head++) {
            const size_t place = (block * kv_heads + head) * block_length;
            const size_t to_key = (place + offset / FRD_TILE * FRD_TILE) * width + offset % FRD_TILE;
            const size_t to_value = (place + offset) * value_width;
            const int64_t from_key = (int64_t)row * strides[0] + (int64_t)head * strides[1];
            const int64_t from_value = (int64_t)row * strides[2] + (int64_t)head * strides[3];
            if (is_bf16)
                store_uint16_t((uint16_t *)keys + to_key, (uint16_t *)values + to_value, (const uint16_t *)key + from_key,
                               (const uint16_t *)value + from_value, width, value_width);
            else
                store_uint32_t((uint32_t *)keys + to_key, (uint32_t *)values + to_value, (const uint32_t *)key + from_key,
                               (const uint32_t *)value + from_value, width, value_width);
        }
    }
}
