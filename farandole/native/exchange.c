/* Everything that moves data and computes nothing: barrier, broadcast, gather, all-gather, scatter,
 * all-to-all.
 *
 * Two patterns serve them all.  `spread`: some ranks have one stream each that several ranks want
 * (broadcast, gather, all-gather).  `deliver`: some ranks have one stream for every other rank (scatter,
 * all-to-all).  Streams go in windows that stay in cache, one phase per window: offer window k while the
 * others take window k - 1.  All-gather and broadcast of tensors in shared buffers copy once, straight
 * from one tensor to the other.
 */
#include <string.h>

#include "internal.h"

struct spread {
    const char *own;                 /* this rank's stream, NULL if it has none */
    char *wanted[FRD_MAX_RANKS];     /* where to put rank r's stream, NULL: not wanted */
    size_t bytes[FRD_MAX_RANKS];     /* of rank r's stream */
};

static void copy_unless_same(char *to, const char *from, size_t bytes)
{
    if (to && from && to != from && bytes) memcpy(to, from, bytes);
}

static size_t longest_of(const size_t *bytes, int count)
{
    size_t longest = 0;
    for (int i = 0; i < count; i++)
        if (bytes[i] > longest) longest = bytes[i];
    return longest;
}

static size_t windows_in(size_t bytes, size_t window) { return (bytes + window - 1) / window; }

static void take_streams(struct frd_group *g, const struct spread *x, size_t step)
{
    const int half = half_of(g->phase);
    for (int r = 0; r < g->ranks; r++) {
        if (r == g->rank || !x->wanted[r]) continue;
        memcpy(x->wanted[r] + step * STAGE_BYTES, g->stages[r].half[!half],
               window_bytes(x->bytes[r], step, STAGE_BYTES));
    }
}

/* Begins with the phase in which the ranks agree, unless `agreed`. */
static int spread(struct frd_group *g, const struct spread *x, bool agreed)
{
    const int me = g->rank;
    const size_t windows = windows_in(longest_of(x->bytes, g->ranks), STAGE_BYTES);
    for (size_t step = 0; step < windows || step == 0; step++) {
        const size_t bytes = window_bytes(x->bytes[me], step, STAGE_BYTES);
        if (x->own && bytes) memcpy(g->stages[me].half[half_of(g->phase)], x->own + step * STAGE_BYTES, bytes);
        if (step) take_streams(g, x, step - 1);
        const int status = step || agreed ? end_phase(g) : agree(g);
        if (status) return status;
    }
    if (windows) take_streams(g, x, windows - 1);
    copy_unless_same(x->wanted[me], x->own, x->bytes[me]);
    return FRD_OK;
}

int frd_barrier(struct frd_group *g, int flags)
{
    begin_call(g, (struct frd_call){.operation = FRD_BARRIER, .root = -1}, flags);
    return agree(g);
}

int frd_broadcast(struct frd_group *g, void *data, size_t count, int type, int root, int flags)
{
    const size_t bytes = count * element_bytes(type);
    struct frd_call call = {.operation = FRD_BROADCAST, .type = (uint32_t)type, .root = root, .count = count};
    struct spread x = {.own = g->rank == root ? data : NULL};
    x.bytes[root] = bytes;
    if (g->rank != root) x.wanted[root] = data;
    const bool small = bytes <= SMALL_BYTES;
    struct region region = {0, NULL, 0};
    if (!small) locate(g, &call, &region, data, bytes);
    begin_call(g, call, flags);
    if (small) return spread(g, &x, false);
    const int status = agree(g);
    if (status) return status;
    if (!all_in_region(g)) return spread(g, &x, true);
    if (g->rank != root) memcpy(data, region.base + (size_t)root * region.stride + call.offset, bytes);
    return end_phase(g);
}

int frd_gather(struct frd_group *g, const void *in, void *const *out, size_t count, int type, int root, int flags)
{
    begin_call(g, (struct frd_call){.operation = FRD_GATHER, .type = (uint32_t)type, .root = root, .count = count},
               flags);
    struct spread x = {.own = in};
    for (int r = 0; r < g->ranks; r++) {
        x.bytes[r] = count * element_bytes(type);
        if (g->rank == root) x.wanted[r] = out[r];
    }
    return spread(g, &x, false);
}

/* `contiguous`: the parts of `out` follow each other. */
static int all_gather(struct frd_group *g, const void *in, void *const *out, const size_t *counts, int type,
                      int flags, bool contiguous)
{
    struct spread x = {.own = in};
    size_t total = 0, before_mine = 0;
    for (int r = 0; r < g->ranks; r++) {
        x.bytes[r] = counts[r] * element_bytes(type);
        x.wanted[r] = out[r];
        if (r == g->rank) before_mine = total;
        total += x.bytes[r];
    }
    struct frd_call call = {.operation = FRD_ALL_GATHER, .type = (uint32_t)type, .root = -1,
                            .count = total / element_bytes(type), .layout = fingerprint(counts, g->ranks)};
    const bool small = total <= SMALL_BYTES;
    struct region region = {0, NULL, 0};
    if (!small && contiguous) locate(g, &call, &region, out[0], total);
    begin_call(g, call, flags);
    if (small) return spread(g, &x, false);
    const int status = agree(g);
    if (status) return status;
    if (!all_in_region(g)) return spread(g, &x, true);
    for (int step = 0; step < g->ranks; step++) { /* every rank begins with itself: no two write to the same one */
        const int r = (g->rank + step) % g->ranks;
        copy_unless_same(region.base + (size_t)r * region.stride + call.offset + before_mine, in, x.bytes[g->rank]);
    }
    return end_phase(g);
}

int frd_all_gather(struct frd_group *g, const void *in, void *const *out, const size_t *counts, int type, int flags)
{
    return all_gather(g, in, out, counts, type, flags, false);
}

int frd_all_gather_even(struct frd_group *g, const void *in, void *out, size_t count, int type, int flags)
{
    void *parts[FRD_MAX_RANKS];
    size_t counts[FRD_MAX_RANKS];
    for (int r = 0; r < g->ranks; r++) {
        parts[r] = (char *)out + (size_t)r * count * element_bytes(type);
        counts[r] = count;
    }
    return all_gather(g, in, parts, counts, type, flags, true);
}

struct delivery {
    const char *out[FRD_MAX_RANKS];    /* for rank d; NULL: nothing */
    size_t out_bytes[FRD_MAX_RANKS];
    char *in[FRD_MAX_RANKS];           /* from rank s; NULL: nothing */
    size_t in_bytes[FRD_MAX_RANKS];
    size_t longest;                    /* stream between any two different ranks */
};

/* Goes on after the ranks agreed. */
static int deliver(struct frd_group *g, const struct delivery *x)
{
    const int me = g->rank;
    const size_t window = window_of(g), windows = windows_in(x->longest, window);
    for (size_t step = 0; step <= windows; step++) {
        const int half = half_of(g->phase);
        char *stage = g->stages[me].half[half];
        for (int d = 0; d < g->ranks && step < windows; d++) {
            const size_t bytes = d == me ? 0 : window_bytes(x->out_bytes[d], step, window);
            if (bytes) memcpy(stage + (size_t)d * window, x->out[d] + step * window, bytes);
        }
        for (int s = 0; s < g->ranks && step; s++) {
            const size_t bytes = s == me ? 0 : window_bytes(x->in_bytes[s], step - 1, window);
            const char *from = g->stages[s].half[!half] + (size_t)me * window;
            if (bytes) memcpy(x->in[s] + (step - 1) * window, from, bytes);
        }
        if (step == windows) break;
        const int status = end_phase(g);
        if (status) return status;
    }
    copy_unless_same(x->in[me], x->out[me], x->out_bytes[me]);
    return FRD_OK;
}

int frd_scatter(struct frd_group *g, const void *const *in, void *out, size_t count, int type, int root, int flags)
{
    begin_call(g, (struct frd_call){.operation = FRD_SCATTER, .type = (uint32_t)type, .root = root, .count = count},
               flags);
    const int status = agree(g);
    if (status) return status;
    struct delivery x = {.longest = count * element_bytes(type)};
    for (int d = 0; d < g->ranks && g->rank == root; d++) {
        x.out[d] = in[d];
        x.out_bytes[d] = x.longest;
    }
    x.in[root] = out;
    x.in_bytes[root] = x.longest;
    return deliver(g, &x);
}

/* Every rank posted what it sends and expects in the phase that has just ended. */
static int check_pairs(struct frd_group *g, size_t *longest)
{
    const struct pair_table *pairs = g->pairs;
    const int half = half_of(g->phase - 1);
    for (int from = 0; from < g->ranks; from++) {
        for (int to = 0; to < g->ranks; to++) {
            const uint64_t sent = pairs->sends[half][from][to];
            if (sent != pairs->receives[half][to][from]) {
                struct frd_call call = g->current;
                call.count = sent;
                call.layout = pairs->receives[half][to][from];
                call.root = g->rank_of[to];
                return break_group(g, FRD_UNEVEN, g->rank_of[from], &call);
            }
            if (from != to && sent > *longest) *longest = sent;
        }
    }
    return FRD_OK;
}

int frd_all_to_all(struct frd_group *g, const void *const *in, const size_t *in_counts, void *const *out,
                   const size_t *out_counts, int type, int flags)
{
    struct delivery x = {.longest = 0};
    const int half = half_of(g->phase);
    for (int r = 0; r < g->ranks; r++) {
        x.out[r] = in[r];
        x.out_bytes[r] = in_counts[r] * element_bytes(type);
        x.in[r] = out[r];
        x.in_bytes[r] = out_counts[r] * element_bytes(type);
        g->pairs->sends[half][g->rank][r] = in_counts[r];
        g->pairs->receives[half][g->rank][r] = out_counts[r];
    }
    begin_call(g, (struct frd_call){.operation = FRD_ALL_TO_ALL, .type = (uint32_t)type, .root = -1}, flags);
    int status = agree(g);
    if (!status) status = check_pairs(g, &x.longest);
    x.longest *= element_bytes(type);
    return status ? status : deliver(g, &x);
}
