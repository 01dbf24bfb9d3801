/* All-reduce, reduce, reduce-scatter and scan.
 *
 * Three algorithms, selected by size and memory (S bytes per rank, n ranks):
 *   small    every rank offers all its values and reduces the values of all ranks: one phase, two cache-line round
 *            trips.
 *   chunked  rank d owns part d.  In windows that stay in cache, a rank offers the others' parts, reduces its own part,
 *            and copies the others' results.  The three steps form a pipeline, so a window costs one phase.  Beyond the
 *            cache a rank reads S and writes S bytes of memory.  A result replaces the offer that it came from, and
 *            cache lines are prefetched with ownership.  So a line moves between two cores twice per window, not four
 *            times.
 *   shared   the tensors are in shared memory: rank d reduces part d of all tensors directly into all tensors.  No
 *            copies; S bytes read and S bytes written per rank; two phases.
 * All algorithms reduce an element in the order of the ranks, from 0 to n-1, so the results are bitwise equal on all
 * ranks and in all runs.
 */
#include <string.h>

#include "internal.h"
#include "kernels.h"

struct reduction {
    frd_reduce_fn kernel;
    size_t element;
    const char *in[FRD_MAX_RANKS]; /* part d of this rank's values */
    char *out[FRD_MAX_RANKS];      /* the destination of part d; NULL: this rank does not need the part */
    size_t bytes[FRD_MAX_RANKS];
    bool shared[FRD_MAX_RANKS]; /* whether rank d needs the results of the other parts */
};

/* Reduces in one phase: the values arrive with the call.  `out` is NULL on ranks without a result. */
static int reduce_small(struct frd_group *g, struct frd_call call, frd_reduce_fn kernel, const void *in, void *out,
                        size_t count, size_t element, int flags)
{
    if (count * element > PAYLOAD_BYTES && !acquire_stage(g)) return FRD_NO_MEMORY;
    begin_call(g, call, flags);
    const int half = half_of(g->phase);
    memcpy(offer_of(g, g->rank, half), in, count * element);
    const int status = agree(g);
    if (!status && out) {
        const void *sources[FRD_MAX_RANKS];
        for (int r = 0; r < g->ranks; r++) sources[r] = r == g->rank ? in : offer_of(g, r, half);
        kernel(&out, 1, sources, g->ranks, count);
    }
    if (g->slot) release_stage(g, !status);
    return status;
}

#define BLOCK 2048 /* bytes copied at a time; the next block is prefetched */

/* Copies the results of window step - 2 out of this rank's half and offers window `step` in the same place. */
static void exchange_parts(struct frd_group *g, const struct reduction *x, size_t step, size_t window, bool take,
                           bool offer)
{
    char *stage = offer_of(g, g->rank, half_of(g->phase));
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
        char *offer = offer_of(g, r, !half) + (size_t)me * window;
        sources[r] = r == me ? x->in[me] + step * window : offer;
        if (r != me && x->shared[r]) targets[count++] = offer;
    }
    x->kernel(targets, count, sources, g->ranks, bytes / x->element);
}

/* `offered`: the first window arrived with the call. */
static int reduce_chunked(struct frd_group *g, const struct reduction *x, bool offered)
{
    const size_t window = window_of(g);
    size_t longest = 0;
    bool sharing = false;
    for (int d = 0; d < g->ranks; d++) {
        if (x->bytes[d] > longest) longest = x->bytes[d];
        sharing |= x->shared[d];
    }
    const size_t windows = (longest + window - 1) / window, steps = windows + (sharing ? 2 : 1);
    for (size_t step = offered; step < steps; step++) {
        exchange_parts(g, x, step, window, sharing && step >= 2, step < windows);
        if (step >= 1 && step <= windows) reduce_own_part(g, x, step - 1, window);
        if (step + 1 == steps) break; /* the last step only copies results */
        const int status = end_phase(g);
        if (status) return status;
    }
    return FRD_OK;
}

/* The first element of part r when `count` elements are split into one part per rank on cache-line boundaries. */
static size_t part_start(size_t count, size_t element, int ranks, int r)
{
    const size_t lines = (count * element + 63) / 64, first = lines * (size_t)r / (size_t)ranks;
    return smaller(count, first * (64 / element));
}

/* Reduces this rank's part of tensors that are all in shared memory. */
static int reduce_shared(struct frd_group *g, frd_reduce_fn kernel, char *const *sources, char *const *targets,
                         size_t count, size_t element, int root)
{
    const size_t start = part_start(count, element, g->ranks, g->rank) * element;
    const size_t end = part_start(count, element, g->ranks, g->rank + 1) * element;
    const void *from[FRD_MAX_RANKS];
    void *to[FRD_MAX_RANKS];
    for (int r = 0; r < g->ranks; r++) {
        from[r] = sources[r] + start;
        to[r] = targets[r] + start;
    }
    kernel(root < 0 ? to : &to[root], root < 0 ? g->ranks : 1, from, g->ranks, (end - start) / element);
    return end_phase(g);
}

static int reduce_to(struct frd_group *g, const void *in, void *out, size_t count, int type, int op, int root, int flags)
{
    const frd_reduce_fn kernel = frd_reduce_kernel(type, op);
    if (!kernel) return FRD_UNSUPPORTED;
    const size_t element = element_bytes(type), bytes = count * element;
    const bool wanted = root < 0 || root == g->rank;
    struct frd_call call = {.operation = root < 0 ? FRD_ALL_REDUCE : FRD_REDUCE,
                            .type = (uint32_t)type, .op = (uint32_t)op, .root = root, .count = count};
    if (bytes <= SMALL_BYTES) return reduce_small(g, call, kernel, in, wanted ? out : NULL, count, element, flags);

    struct reduction x = {.kernel = kernel, .element = element};
    for (int d = 0; d < g->ranks; d++) {
        const size_t start = part_start(count, element, g->ranks, d);
        x.in[d] = (const char *)in + start * element;
        x.shared[d] = root < 0 || d == root;
        x.out[d] = wanted ? (char *)out + start * element : NULL;
        x.bytes[d] = (part_start(count, element, g->ranks, d + 1) - start) * element;
    }
    call.source = address_if_shared(in, bytes);
    call.target = address_if_shared(out, bytes);
    const bool private = !call.source || !call.target;
    if (!acquire_stage(g)) return FRD_NO_MEMORY;
    begin_call(g, call, flags);
    if (private) exchange_parts(g, &x, 0, window_of(g), false, true);
    int status = agree(g);
    if (!status) {
        char *sources[FRD_MAX_RANKS], *targets[FRD_MAX_RANKS];
        bool offered = private; /* equal on all ranks, because every rank sees the same calls */
        for (int r = 0; r < g->ranks; r++) offered &= !call_of(g, r)->source || !call_of(g, r)->target;
        status = find_sources(g, bytes, sources) && find_targets(g, bytes, targets)
                     ? reduce_shared(g, kernel, sources, targets, count, element, root)
                     : reduce_chunked(g, &x, offered);
    }
    release_stage(g, !status);
    return status;
}

int frd_all_reduce(struct frd_group *g, void *data, size_t count, int type, int op, int flags)
{
    return reduce_to(g, data, data, count, type, op, -1, flags);
}

int frd_all_reduce_to(struct frd_group *g, const void *in, void *out, size_t count, int type, int op, int flags)
{
    return reduce_to(g, in, out, count, type, op, -1, flags);
}

int frd_reduce(struct frd_group *g, void *data, size_t count, int type, int op, int root, int flags)
{
    return is_rank(root, g->ranks) ? reduce_to(g, data, data, count, type, op, root, flags) : FRD_INVALID;
}

/* `in` holds the parts for all ranks; in[d] has counts[d] elements.  `contiguous`: the parts are adjacent in memory. */
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
    const size_t tiny = PAYLOAD_BYTES / (size_t)g->ranks / 64 * 64;
    const size_t window = total * x.element <= tiny ? tiny : window_of(g);
    const bool small = total * x.element <= smaller(SMALL_BYTES, window); /* no part is larger than a window */
    if (window != tiny && !acquire_stage(g)) return FRD_NO_MEMORY;
    if (!small && contiguous) call.source = address_if_shared(in[0], total * x.element);
    const bool private = !call.source;
    begin_call(g, call, flags);
    if (private) exchange_parts(g, &x, 0, window, false, true);
    int status = agree(g);
    if (!status && small) {
        reduce_own_part(g, &x, 0, window);
    } else if (!status) {
        char *sources[FRD_MAX_RANKS];
        bool offered = private;
        for (int r = 0; r < g->ranks; r++) offered &= !call_of(g, r)->source;
        if (find_sources(g, total * x.element, sources)) {
            const void *from[FRD_MAX_RANKS];
            for (int r = 0; r < g->ranks; r++) from[r] = sources[r] + before_mine * x.element;
            x.kernel(&out, 1, from, g->ranks, counts[g->rank]);
            status = end_phase(g);
        } else {
            status = reduce_chunked(g, &x, offered);
        }
    }
    if (g->slot) release_stage(g, !status);
    return status;
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

/* Every rank offers windows of its values and reduces the windows of the ranks up to itself. */
int frd_scan(struct frd_group *g, const void *in, void *out, size_t count, int type, int op, int exclusive, int flags)
{
    const frd_reduce_fn kernel = frd_reduce_kernel(type, op);
    if (!kernel || op == FRD_AVG) return FRD_UNSUPPORTED;
    const size_t element = element_bytes(type), length = STAGE_BYTES / element;
    const int sources_count = exclusive ? g->rank : g->rank + 1;
    const struct frd_call call = {.operation = exclusive ? FRD_EXSCAN : FRD_SCAN, .type = (uint32_t)type,
                                  .op = (uint32_t)op, .root = -1, .count = count};
    if (count * element > PAYLOAD_BYTES && !acquire_stage(g)) return FRD_NO_MEMORY;
    begin_call(g, call, flags);
    int status = FRD_OK;
    for (size_t start = 0; !status && (start < count || start == 0); start += length) {
        const size_t here = smaller(length, count - start);
        const int half = half_of(g->phase);
        memcpy(offer_of(g, g->rank, half), (const char *)in + start * element, here * element);
        status = start ? end_phase(g) : agree(g);
        const void *sources[FRD_MAX_RANKS];
        for (int r = 0; r < g->ranks; r++) sources[r] = offer_of(g, r, half);
        void *target = (char *)out + start * element;
        if (!status && sources_count) kernel(&target, 1, sources, sources_count, here);
    }
    if (g->slot) release_stage(g, !status);
    return status;
}
