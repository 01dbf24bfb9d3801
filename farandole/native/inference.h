/* Kernels for generation.  Each row of a result depends only on its own inputs, and its sums are computed in a fixed
 * order. */
#ifndef FARANDOLE_INFERENCE_H
#define FARANDOLE_INFERENCE_H

#include <stddef.h>
#include <stdint.h>

#include "team.h"

#define FRD_PANEL 16 /* outputs per panel of packed weights; the number of panels is even */
#define FRD_TILE 16  /* positions per tile of keys */
#define FRD_GROUP 4  /* the largest number of heads that attention computes together */
/* The number of inputs per block.  The products of a block are summed first, and then the sum is added to an output.  A
 * block of a panel fits in the L1 cache.  A sum of up to 512 products of an int8 and an int16 value fits in 32 bits. */
#define FRD_BLOCK 256
#define FRD_LARGEST_INT16 32767

/* The rows of a product are divided evenly into blocks.  The rows of a block are computed together. */
#define FRD_ROW_BLOCKS(ROWS, MOST) (((ROWS) + (MOST) - 1) / (MOST))

/* The number of inputs is padded to an even number. */
struct frd_linear_task {
    float *out;           /* (rows, outputs) */
    const void *x; /* (blocks of rows, inputs, rows), or for int8 weights int16 (blocks, inputs / 2, rows, 2) */
    const float *factors; /* (rows), factors of int16 inputs */
    const void *packed;   /* (panels, inputs, FRD_PANEL), or for bf16 and int8 (panels, inputs / 2, FRD_PANEL, 2) */
    const float *scales;  /* (outputs), factors of int8 weights */
    const float *bias;    /* (outputs) or NULL */
    size_t rows, inputs, outputs;
    int type; /* of the weights: FRD_WEIGHTS_... */
    int adds; /* whether the product is added to `out` */
};

struct frd_norm_task {
    void *out;          /* (rows, width) */
    const void *x;      /* (rows, width) */
    const void *weight; /* (width) */
    size_t rows, width;
    float epsilon;
};

struct frd_rotate_task {
    void *out;                  /* (rows, heads, width) */
    const void *x;              /* (rows, heads, width), with a stride per row and per head */
    const void *cosine, *sine;  /* (rows, width / 2) */
    size_t rows, heads, width;
    int64_t row_stride, head_stride;
};

struct frd_attend_task {
    float *out;               /* (queries, heads, value width) */
    const float *query;       /* (queries, heads, width), with a stride per query and per head */
    const void *keys;         /* (blocks, key-value heads, block length / FRD_TILE, width, FRD_TILE) */
    const void *values;       /* (blocks, key-value heads, block length, value width) */
    const int32_t *table;     /* (queries, table width), the blocks of each query's sequence */
    const int64_t *positions; /* (queries), each query attends to the positions from 0 to its own */
    size_t queries, heads, kv_heads, width, value_width, block_length, table_width;
    int64_t query_stride, head_stride;
    int64_t window; /* number of most recent positions that a query attends to; 0: all */
    float scale;
    int is_bf16; /* 1: keys and values are bf16; 0: fp32 */
};

/* The kernels of one vector level.  A call to `linear` computes some outputs, a call to `prepare` prepares one block of
 * rows, and a call to `attend` computes one query with one key-value head.  `scores` has space for the scores of a
 * group of heads for all positions, rounded up to a multiple of 4 tiles. */
struct frd_inference {
    void (*linear)(const struct frd_linear_task *task, size_t number);
    size_t outputs, most_rows; /* outputs that `linear` computes per item, and maximum rows per block */
    /* writes a block of rows (rows, inputs) to `out` and `factors`, the inputs of a product */
    void (*prepare)(const struct frd_linear_task *task, const float *x, void *out, float *factors, size_t block);
    void (*norm[2])(const struct frd_norm_task *task); /* for fp32 and bf16 */
    void (*swiglu[2])(void *out, const void *x, size_t rows, size_t width);
    void (*rotate[2])(const struct frd_rotate_task *task);
    void (*narrow)(uint16_t *out, const float *x, size_t count); /* to bf16 */
    void (*attend)(const struct frd_attend_task *task, size_t number, float *scores);
};

const struct frd_inference *frd_kernels(void); /* for this processor */
struct frd_work frd_linear_work(const struct frd_linear_task *task);
struct frd_work frd_attend_work(const struct frd_attend_task *task);

extern const struct frd_inference frd_inference_plain;
#if defined(__x86_64__)
extern const struct frd_inference frd_inference_avx2;
extern const struct frd_inference frd_inference_avx512;
#endif

#endif
