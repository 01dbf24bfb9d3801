/* All-reduce, reduce and reduce-scatter.
 *
 * Three ways, by size and place (S bytes per rank, n ranks):
 *   small    every rank offers everything and reduces everything: one phase, two cache-line round trips.
 *   chunked  rank d owns part d.  In windows that stay in cache: offer the others' parts, reduce the own
 *            one, take the others' results.  The three run as a pipeline, so a window costs one phase.
 *            Beyond the cache a rank reads S and writes S of memory; all else stays in cache.  A result
 *            replaces the offer that it came from, and every access asks for the cache line to keep: so a
 *            line crosses between two cores twice per window, not four times.
 *   shared   the tensors are in shared buffers: rank d reduces part d from all of them straight into all of
 *            them.  No copies; S read and S written per rank; two phases.
 * In all three one rank computes a given element, from rank 0's value to rank n-1's, so the results are the
 * same bits on every rank and in every run.
 */
#include <string.h>

#include "internal.h"
#include "kernels.h"

struct reduction {
    frd_reduce_fn kernel;
    size_t element;
    const char *in[FRD_MAX_RANKS]; /* part d, for or from rank d */
    char *out[FRD_MAX_RANKS];      /* NULL: this rank does not want it */
    size_t bytes[FRD_MAX_RANKS];
    bool shared[FRD_MAX_RANKS]; /* does rank d want the results of the others' parts? */
};

/* `out` is NULL where the result is not wanted. */
static int reduce_small(struct frd_group *g, frd_reduce_fn kernel, const void *in, void *out, size_t count,
                        size_t element)
{
    const int half = half_of(g->phase);
    memcpy(g->stages[g->rank].half[half], in, count * element);
    const int status = agree(g);
    if (status || !out) return status;
    const void *sources[FRD_MAX_RANKS];
    for (int r = 0; r < g->ranks; r++) sources[r] = r == g->rank ? in : g->stages[r].half[half];
    kernel(&out, 1, sources, g->ranks, count);
    return FRD_OK;
}

#define BLOCK 2048 /* bytes copied in and out at a time: half a page of lines asked for ahead */

/* Takes from this rank's half what the owners of the parts made of window step - 2, and offers window step
 * in its place.  */
static void exchange_parts(struct frd_group *g, const struct reduction *x, size_t step, size_t window, bool take,
                           bool offer)
{
    char *stage = g->stages[g->rank].half[half_of(g->phase)];
    for (int d = 0; d < g->ranks; d++) {
        if (d == g->rank) continue;
        char *slot = stage + (size_t)d * window;
        const size_t taken = take && x->out[d] ? window_bytes(x->bytes[d], step - 2, window) : 0;
        const size_t offered = offer ? window_bytes(x->bytes[d], step, window) : 0;
        for (size_t at = 0; at < window && (at < taken || at < offered); at += BLOCK) {
            claim_lines(slot + at + BLOCK, at + BLOCK < window ? BLOCK : 0);
            if (at < taken) memcpy(x->out[d] + (step - 2) * window + at, slot + at, smaller(BLOCK, taken - at));
            if (at < offered) memcpy(slot + at, x->in[d] + step * window + at, smaller(BLOCK, offered - at));
        }
    }
}

static void reduce_own_part(struct frd_group *g, const struct reduction *x, size_t step, size_t window)
{
    const int me = g->rank, half = half_of(g->phase);
    const size_t bytes = window_bytes(x->bytes[me], step, window);
    if (!bytes) return;
    const void *sources[FRD_MAX_RANKS];
    void *targets[FRD_MAX_RANKS];
    int count = 0;
    if (x->out[me]) targets[count++] = x->out[me] + step * window;
    for (int r = 0; r < g->ranks; r++) {
        char *offer = g->stages[r].half[!half] + (size_t)me * window;
        sources[r] = r == me ? x->in[me] + step * window : offer;
        if (r != me && x->shared[r]) targets[count++] = offer;
    }
    x->kernel(targets, count, sources, g->ranks, bytes / x->element);
}

static int reduce_chunked(struct frd_group *g, const struct reduction *x)
{
    const size_t window = window_of(g);
    size_t longest = 0;
    bool sharing = false;
    for (int d = 0; d < g->ranks; d++) {
        if (x->bytes[d] > longest) longest = x->bytes[d];
        sharing |= x->shared[d];
    }
    const size_t windows = (longest + window - 1) / window, steps = windows + (sharing ? 2 : 1);
    for (size_t step = 0; step < steps; step++) {
        exchange_parts(g, x, step, window, sharing && step >= 2, step < windows);
        if (step >= 1 && step <= windows) reduce_own_part(g, x, step - 1, window);
        if (step + 1 == steps) break; /* the last one only takes what is there */
        const int status = end_phase(g);
        if (status) return status;
    }
    return FRD_OK;
}

/* Splits `count` elements into one part per rank, on cache-line boundaries: part r starts here. */
static size_t part_start(size_t count, size_t element, int ranks, int r)
{
    const size_t lines = (count * element + 63) / 64, first = lines * (size_t)r / (size_t)ranks;
    return smaller(count, first * (64 / element));
}

/* Elements [start, start + count) of the tensors that lie at `offset` of every rank's shared buffer. */
static void reduce_shared(struct frd_group *g, frd_reduce_fn kernel, const struct region *region, size_t element,
                          size_t start, size_t count, void *const *targets, int target_count)
{
    const void *sources[FRD_MAX_RANKS];
    for (int r = 0; r < g->ranks; r++)
        sources[r] = region->base + (size_t)r * region->stride + g->current.offset + start * element;
    kernel(targets, target_count, sources, g->ranks, count);
}

static int reduce_in_region(struct frd_group *g, frd_reduce_fn kernel, const struct region *region, size_t count,
                            size_t element, int root)
{
    const size_t start = part_start(count, element, g->ranks, g->rank);
    const size_t end = part_start(count, element, g->ranks, g->rank + 1);
    void *targets[FRD_MAX_RANKS];
    for (int r = 0; r < g->ranks; r++)
        targets[r] = region->base + (size_t)r * region->stride + g->current.offset + start * element;
    if (root < 0)
        reduce_shared(g, kernel, region, element, start, end - start, targets, g->ranks);
    else
        reduce_shared(g, kernel, region, element, start, end - start, &targets[root], 1);
    return end_phase(g);
}

static int reduce_to(struct frd_group *g, void *data, size_t count, int type, int op, int root, int flags)
{
    const frd_reduce_fn kernel = frd_reduce_kernel(type, op);
    if (!kernel) return FRD_UNSUPPORTED;
    const size_t element = element_bytes(type), bytes = count * element;
    const bool wanted = root < 0 || root == g->rank;
    struct frd_call call = {.operation = root < 0 ? FRD_ALL_REDUCE : FRD_REDUCE,
                            .type = (uint32_t)type, .op = (uint32_t)op, .root = root, .count = count};
    if (bytes <= SMALL_BYTES) {
        begin_call(g, call, flags);
        return reduce_small(g, kernel, data, wanted ? data : NULL, count, element);
    }

    struct region region;
    locate(g, &call, &region, data, bytes);
    begin_call(g, call, flags);
    const int status = agree(g);
    if (status) return status;
    if (all_in_region(g)) return reduce_in_region(g, kernel, &region, count, element, root);

    struct reduction x = {.kernel = kernel, .element = element};
    for (int d = 0; d < g->ranks; d++) {
        const size_t start = part_start(count, element, g->ranks, d);
        x.in[d] = (const char *)data + start * element;
        x.shared[d] = root < 0 || d == root;
        x.out[d] = wanted ? (char *)data + start * element : NULL;
        x.bytes[d] = (part_start(count, element, g->ranks, d + 1) - start) * element;
    }
    return reduce_chunked(g, &x);
}

int frd_all_reduce(struct frd_group *g, void *data, size_t count, int type, int op, int flags)
{
    return reduce_to(g, data, count, type, op, -1, flags);
}

int frd_reduce(struct frd_group *g, void *data, size_t count, int type, int op, int root, int flags)
{
    return reduce_to(g, data, count, type, op, root, flags);
}

/* `in` holds the parts of all ranks, in[d] of counts[d] elements; `contiguous` if they follow each other. */
static int reduce_scatter(struct frd_group *g, const void *const *in, const size_t *counts, void *out, int type,
                          int op, int flags, bool contiguous)
{
    struct reduction x = {.kernel = frd_reduce_kernel(type, op), .element = element_bytes(type)};
    if (!x.kernel) return FRD_UNSUPPORTED;
    size_t total = 0, before_mine = 0;
    for (int d = 0; d < g->ranks; d++) {
        if (d == g->rank) before_mine = total;
        total += counts[d];
        x.in[d] = in[d];
        x.bytes[d] = counts[d] * x.element;
    }
    x.out[g->rank] = out;
    struct frd_call call = {.operation = FRD_REDUCE_SCATTER, .type = (uint32_t)type, .op = (uint32_t)op,
                            .root = -1, .count = total, .layout = fingerprint(counts, g->ranks)};
    const size_t window = window_of(g);
    if (total * x.element <= smaller(SMALL_BYTES, window)) { /* no part is larger than a window */
        begin_call(g, call, flags);
        exchange_parts(g, &x, 0, window, false, true);
        const int status = agree(g);
        if (!status) reduce_own_part(g, &x, 0, window);
        return status;
    }
    struct region region = {0, NULL, 0};
    if (contiguous) locate(g, &call, &region, in[0], total * x.element);
    begin_call(g, call, flags);
    const int status = agree(g);
    if (status) return status;
    if (!all_in_region(g)) return reduce_chunked(g, &x);
    reduce_shared(g, x.kernel, &region, x.element, before_mine, counts[g->rank], &out, 1);
    return end_phase(g);
}

int frd_reduce_scatter(struct frd_group *g, const void *const *in, const size_t *counts, void *out, int type,
                       int op, int flags)
{
    return reduce_scatter(g, in, counts, out, type, op, flags, false);
}

int frd_reduce_scatter_even(struct frd_group *g, const void *in, void *out, size_t count, int type, int op,
                            int flags)
{
    const void *parts[FRD_MAX_RANKS];
    size_t counts[FRD_MAX_RANKS];
    for (int d = 0; d < g->ranks; d++) {
        parts[d] = (const char *)in + (size_t)d * count * element_bytes(type);
        counts[d] = count;
    }
    return reduce_scatter(g, parts, counts, out, type, op, flags, true);
}
