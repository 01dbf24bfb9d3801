/* One step of a decoder with RMS normalization, rotary positions and a gated feed-forward network (Llama, Mistral,
 * Qwen), in one parallel region.
 *
 * Hidden states and activations are fp32.  The kernels come from `inference.c`, so each row of a result depends only on
 * its own token and sequence.
 */
#include <string.h>

#include "core.h"
#include "inference.h"

/* Memory of a step, laid out in one workspace. */
struct buffers {
    float *normal, *projected, *mixed, *both, *activated, *factors;
    void *inputs; /* of the next product */
    struct layer_tasks *tasks;
    struct frd_work *works;
};

struct layer_tasks {
    const struct frd_decoder *decoder;
    const struct frd_step *step;
    const struct frd_layer *layer; /* NULL for the head */
    const struct buffers *buffers;
    struct frd_linear_task qkv, out, gate_up, down;
    struct frd_attend_task attend;
};

enum { WORKS_PER_LAYER = 10, WORKS_OF_HEAD = 2 };

static size_t larger(size_t a, size_t b)
{
    return a > b ? a : b;
}

/* Lays out the buffers for `rows` rows from address `at`, and returns the end. */
static char *lay_out(struct buffers *buffers, const struct frd_decoder *decoder, size_t rows, char *at)
{
    const size_t heads = decoder->heads * decoder->head_width, kv = decoder->kv_heads * decoder->head_width;
    const size_t widest = larger(larger(decoder->width, heads), decoder->inner) + 1;
    const size_t works = decoder->layer_count * WORKS_PER_LAYER + WORKS_OF_HEAD;
#define PLACE(FIELD, BYTES) buffers->FIELD = (void *)at, at += ((BYTES) + 63) / 64 * 64
    PLACE(normal, rows * decoder->width * sizeof(float));
    PLACE(projected, rows * (heads + 2 * kv) * sizeof(float));
    PLACE(mixed, rows * heads * sizeof(float));
    PLACE(both, rows * 2 * decoder->inner * sizeof(float));
    PLACE(activated, rows * decoder->inner * sizeof(float));
    PLACE(factors, rows * sizeof(float));
    PLACE(inputs, rows * widest * sizeof(float));
    PLACE(tasks, (decoder->layer_count + 1) * sizeof(struct layer_tasks));
    PLACE(works, works * sizeof(struct frd_work));
#undef PLACE
    return at;
}

size_t frd_decoder_bytes(const struct frd_decoder *decoder, size_t rows)
{
    struct buffers buffers;
    return (size_t)(lay_out(&buffers, decoder, rows, NULL) - (char *)NULL) + 64;
}

/* ---- items ---- */

/* Returns the first row of a block of rows. */
static size_t first_row(size_t rows, size_t block)
{
    return block * rows / FRD_ROW_BLOCKS(rows, frd_kernels()->most_rows);
}

static void normalize(const struct layer_tasks *tasks, const struct frd_linear_task *next, const float *hidden,
                      const float *weight, size_t block)
{
    const size_t width = tasks->decoder->width, row = first_row(next->rows, block);
    float *out = tasks->buffers->normal;
    frd_rms_norm(out + row * width, hidden + row * width, weight, first_row(next->rows, block + 1) - row, width,
                 tasks->decoder->epsilon, false);
    frd_kernels()->prepare(next, out, tasks->buffers->inputs, tasks->buffers->factors, block);
}

static void normalize_for_attention(const void *task, size_t block, void *scratch)
{
    const struct layer_tasks *tasks = task;
    (void)scratch;
    normalize(tasks, &tasks->qkv, tasks->step->hidden, tasks->layer->norm_attention, block);
}

static void normalize_for_feed_forward(const void *task, size_t block, void *scratch)
{
    const struct layer_tasks *tasks = task;
    (void)scratch;
    normalize(tasks, &tasks->gate_up, tasks->step->hidden, tasks->layer->norm_feed_forward, block);
}

/* Rotates the queries and keys of one row, and stores its keys and values. */
static void append(const void *task, size_t row, void *scratch)
{
    const struct layer_tasks *tasks = task;
    const struct frd_decoder *decoder = tasks->decoder;
    const struct frd_step *step = tasks->step;
    const struct frd_layer *layer = tasks->layer;
    const size_t heads = decoder->heads, kv_heads = decoder->kv_heads, width = decoder->head_width;
    float *query = tasks->buffers->projected + row * (heads + 2 * kv_heads) * width;
    float *key = query + heads * width;
    if (layer->norm_query) frd_rms_norm(query, query, layer->norm_query, heads, width, decoder->epsilon, false);
    if (layer->norm_query) frd_rms_norm(key, key, layer->norm_key, kv_heads, width, decoder->epsilon, false);
    const size_t at = (size_t)step->positions[row] * (width / 2);
    frd_rotate(query, query, decoder->cosine + at, decoder->sine + at, 1, heads + kv_heads, width, 0, (int64_t)width,
               false);
    const void *from = key;
    if (decoder->is_bf16) {
        frd_kernels()->narrow(scratch, key, 2 * kv_heads * width);
        from = scratch;
    }
    const int64_t strides[4] = {0, (int64_t)width, 0, (int64_t)width};
    frd_store(layer->keys, layer->values, from, (const char *)from + kv_heads * width * (decoder->is_bf16 ? 2 : 4),
              step->table + row * step->table_width, step->positions + row, 1, kv_heads, width, width,
              step->block_length, step->table_width, strides, decoder->is_bf16);
}

static void prepare_mixed(const void *task, size_t block, void *scratch)
{
    const struct layer_tasks *tasks = task;
    (void)scratch;
    frd_kernels()->prepare(&tasks->out, tasks->buffers->mixed, tasks->buffers->inputs, tasks->buffers->factors, block);
}

static void activate(const void *task, size_t block, void *scratch)
{
    const struct layer_tasks *tasks = task;
    const size_t inner = tasks->decoder->inner, rows = tasks->step->rows, row = first_row(rows, block);
    float *out = tasks->buffers->activated;
    (void)scratch;
    frd_swiglu(out + row * inner, tasks->buffers->both + row * 2 * inner, first_row(rows, block + 1) - row, inner, false);
    frd_kernels()->prepare(&tasks->down, out, tasks->buffers->inputs, tasks->buffers->factors, block);
}

/* Normalizes the selected rows for the head. */
static void normalize_for_head(const void *task, size_t block, void *scratch)
{
    const struct layer_tasks *tasks = task;
    const size_t width = tasks->decoder->width, rows = tasks->step->selected_count, end = first_row(rows, block + 1);
    float *chosen = tasks->buffers->normal;
    (void)scratch;
    for (size_t row = first_row(rows, block); row < end; row++)
        memcpy(chosen + row * width, tasks->step->hidden + (size_t)tasks->step->selected[row] * width,
               width * sizeof(float));
    normalize(tasks, &tasks->out, chosen, tasks->decoder->norm, block);
}

/* ---- operations ---- */

static struct frd_linear_task product(const struct frd_matrix *matrix, size_t rows, const struct buffers *buffers,
                                      float *out, size_t inputs, size_t outputs, int adds)
{
    return (struct frd_linear_task){
        .out = out, .x = buffers->inputs, .factors = buffers->factors, .packed = matrix->packed, .scales = matrix->scales,
        .bias = matrix->bias, .rows = rows, .inputs = inputs, .outputs = outputs, .type = matrix->type, .adds = adds,
    };
}

static struct frd_work *add_layer(struct frd_work *works, struct layer_tasks *tasks)
{
    const struct frd_decoder *decoder = tasks->decoder;
    const struct frd_step *step = tasks->step;
    const struct frd_layer *layer = tasks->layer;
    const struct buffers *buffers = tasks->buffers;
    const size_t rows = step->rows, blocks = FRD_ROW_BLOCKS(rows, frd_kernels()->most_rows);
    const size_t head_width = decoder->head_width, heads = decoder->heads * head_width;
    const size_t all = heads + 2 * decoder->kv_heads * head_width, width = decoder->width, inner = decoder->inner;
    tasks->qkv = product(&layer->qkv, rows, buffers, buffers->projected, width, all, false);
    tasks->out = product(&layer->out, rows, buffers, step->hidden, heads, width, true);
    tasks->gate_up = product(&layer->gate_up, rows, buffers, buffers->both, width, 2 * inner, false);
    tasks->down = product(&layer->down, rows, buffers, step->hidden, inner, width, true);
    tasks->attend = (struct frd_attend_task){
        .out = buffers->mixed, .query = buffers->projected, .keys = layer->keys, .values = layer->values,
        .table = step->table, .positions = step->positions, .queries = rows, .heads = decoder->heads,
        .kv_heads = decoder->kv_heads, .width = head_width, .value_width = head_width,
        .block_length = step->block_length, .table_width = step->table_width, .query_stride = (int64_t)all,
        .head_stride = (int64_t)head_width, .window = layer->window, .scale = decoder->scale, .is_bf16 = decoder->is_bf16,
    };
    const size_t scratch = 2 * decoder->kv_heads * head_width * sizeof(uint16_t);
    *works++ = (struct frd_work){normalize_for_attention, tasks, blocks, 0};
    *works++ = frd_linear_work(&tasks->qkv);
    *works++ = (struct frd_work){append, tasks, rows, scratch};
    *works++ = frd_attend_work(&tasks->attend);
    *works++ = (struct frd_work){prepare_mixed, tasks, blocks, 0};
    *works++ = frd_linear_work(&tasks->out);
    *works++ = (struct frd_work){normalize_for_feed_forward, tasks, blocks, 0};
    *works++ = frd_linear_work(&tasks->gate_up);
    *works++ = (struct frd_work){activate, tasks, blocks, 0};
    *works++ = frd_linear_work(&tasks->down);
    return works;
}

static struct frd_work *add_head(struct frd_work *works, struct layer_tasks *tasks)
{
    const struct frd_decoder *decoder = tasks->decoder;
    const struct frd_step *step = tasks->step;
    const size_t rows = step->selected_count;
    tasks->out = product(&decoder->head, rows, tasks->buffers, step->logits, decoder->width, decoder->vocabulary, false);
    *works++ = (struct frd_work){normalize_for_head, tasks, FRD_ROW_BLOCKS(rows, frd_kernels()->most_rows), 0};
    *works++ = frd_linear_work(&tasks->out);
    return works;
}

int frd_decoder_step(const struct frd_decoder *decoder, const struct frd_step *step, int threads)
{
    struct buffers buffers;
    lay_out(&buffers, decoder, step->rows, (char *)(((uintptr_t)step->workspace + 63) / 64 * 64));
    struct frd_work *end = buffers.works;
    for (size_t i = 0; i < decoder->layer_count; i++) {
        struct layer_tasks *tasks = buffers.tasks + i;
        *tasks = (struct layer_tasks){decoder, step, decoder->layers + i, &buffers, {0}, {0}, {0}, {0}, {0}};
        end = add_layer(end, tasks);
    }
    if (step->selected_count) {
        struct layer_tasks *tasks = buffers.tasks + decoder->layer_count;
        *tasks = (struct layer_tasks){decoder, step, NULL, &buffers, {0}, {0}, {0}, {0}, {0}};
        end = add_head(end, tasks);
    }
    return frd_run(buffers.works, (size_t)(end - buffers.works), threads);
}
