/* Products, element-wise operations, attention and key-value storage for generation. */
#include "inference.h"

#include <stdlib.h>
#include <string.h>

#include "core.h"
#include "kernels.h"
#include "team.h"

const struct frd_inference *frd_kernels(void)
{
#if defined(__x86_64__)
    const int level = frd_vector_level_in_use();
    if (level == FRD_AVX512) return &frd_inference_avx512;
    if (level == FRD_AVX2) return &frd_inference_avx2;
#endif
    return &frd_inference_plain;
}

/* ---- packed weights ---- */

static size_t padded(size_t outputs)
{
    return (outputs + 2 * FRD_PANEL - 1) / (2 * FRD_PANEL) * (2 * FRD_PANEL);
}

static const size_t weight_size[] = {[FRD_WEIGHTS_F32] = 4, [FRD_WEIGHTS_BF16] = 2, [FRD_WEIGHTS_INT8] = 1};

size_t frd_packed_size(size_t outputs, size_t inputs, int type)
{
    return padded(outputs) * (inputs + inputs % 2) * weight_size[type];
}

/* `group` adjacent inputs are interleaved. */
#define PACK(TYPE)                                                                                                     \
    static void pack_##TYPE(TYPE *packed, const TYPE *weight, size_t outputs, size_t inputs, size_t group)             \
    {                                                                                                                  \
        const size_t count = padded(outputs);                                                                          \
        for (size_t first = 0; first < count; first += FRD_PANEL)                                                      \
            for (size_t k = 0; k < inputs + inputs % 2; k += group)                                                                 \
                for (size_t output = first; output < first + FRD_PANEL; output++)                                      \
                    for (size_t i = k; i < k + group; i++)                                                             \
                        *packed++ = output < outputs && i < inputs ? weight[output * inputs + i] : (TYPE)0;            \
    }

PACK(uint32_t)
PACK(uint16_t)
PACK(int8_t)

void frd_pack(void *packed, const void *weight, size_t outputs, size_t inputs, int type)
{
    if (type == FRD_WEIGHTS_F32) pack_uint32_t(packed, weight, outputs, inputs, 1);
    else if (type == FRD_WEIGHTS_BF16) pack_uint16_t(packed, weight, outputs, inputs, 2);
    else pack_int8_t(packed, weight, outputs, inputs, 2);
}

/* ---- products ---- */

static void linear_item(const void *task, size_t number, void *scratch)
{
    (void)scratch;
    frd_kernels()->linear(task, number);
}

struct prepare_task {
    const struct frd_linear_task *linear;
    const float *x;
    void *out;
    float *factors;
};

static void prepare_item(const void *task, size_t number, void *scratch)
{
    const struct prepare_task *own = task;
    (void)scratch;
    frd_kernels()->prepare(own->linear, own->x, own->out, own->factors, number);
}

struct frd_work frd_linear_work(const struct frd_linear_task *task)
{
    const size_t outputs = frd_kernels()->outputs;
    return (struct frd_work){.run = linear_item, .task = task, .count = (task->outputs + outputs - 1) / outputs};
}

int frd_linear(float *out, const float *x, const void *packed, const float *scales, const float *bias, size_t rows,
               size_t inputs, size_t outputs, int type, int threads)
{
    if (!rows) return FRD_OK;
    float *prepared = malloc(rows * (inputs + 2) * sizeof *prepared), *factors = prepared;
    if (!prepared) return FRD_NO_MEMORY;
    const struct frd_linear_task linear = {out,  prepared + rows, factors, packed, scales, bias,
                                           rows, inputs,          outputs, type,   false};
    const struct prepare_task prepare = {&linear, x, prepared + rows, factors};
    const struct frd_work works[] = {{prepare_item, &prepare, FRD_ROW_BLOCKS(rows, frd_kernels()->most_rows), 0},
                                     frd_linear_work(&linear)};
    const int status = frd_run(works, 2, threads);
    free(prepared);
    return status;
}

/* ---- element-wise operations ---- */

void frd_rms_norm(void *out, const void *x, const void *weight, size_t rows, size_t width, float epsilon, int is_bf16)
{
    frd_kernels()->norm[is_bf16](&(struct frd_norm_task){out, x, weight, rows, width, epsilon});
}

void frd_swiglu(void *out, const void *x, size_t rows, size_t width, int is_bf16)
{
    frd_kernels()->swiglu[is_bf16](out, x, rows, width);
}

void frd_rotate(void *out, const void *x, const void *cosine, const void *sine, size_t rows, size_t heads, size_t width,
                int64_t row_stride, int64_t head_stride, int is_bf16)
{
    const struct frd_rotate_task task = {out, x, cosine, sine, rows, heads, width, row_stride, head_stride};
    frd_kernels()->rotate[is_bf16](&task);
}

/* ---- attention ---- */

static void attend_item(const void *task, size_t number, void *scratch)
{
    frd_kernels()->attend(task, number, scratch);
}

struct frd_work frd_attend_work(const struct frd_attend_task *task)
{
    int64_t longest = 0;
    for (size_t i = 0; i < task->queries; i++) longest = task->positions[i] > longest ? task->positions[i] : longest;
    const size_t stride = ((size_t)longest + 1 + 2 * FRD_TILE * 4) / 64 * 64 + 64;
    return (struct frd_work){.run = attend_item,
                             .task = task,
                             .count = task->queries * task->kv_heads,
                             .scratch_bytes = FRD_GROUP * stride * sizeof(float)};
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
    struct frd_work work = frd_attend_work(&task);
    return queries ? frd_run(&work, 1, threads) : FRD_OK;
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
