/* Collectives that only move data: barrier, broadcast, gather, all-gather, scatter,
 * all-to-all.
 *
 * Three algorithms, selected by size and memory:
 *   pulled   tensors in shared memory: each receiver copies its part to its own tensor.  One copy, two phases.
 *   pushed   results in shared memory (all-gather, all-to-all): every rank writes its parts into them.
 *   staged   otherwise, in windows that stay in cache, one phase per window: a rank offers window k while the others
 *            read window k - 1.  The first window arrives with the call, so a small call takes one phase.
 * Staged calls have two patterns.  `spread`: some ranks have one stream each for several receivers (broadcast, gather,
 * all-gather).  `deliver`: some ranks have a separate stream for every other rank (scatter, all-to-all).
 */
#include <string.h>

#include "internal.h"

static void copy_unless_same(char *to, const char *from, size_t bytes)
{
    if (to && from && to != from && bytes) memcpy(to, from, bytes);
}

static size_t windows_in(size_t bytes, size_t window) { return (bytes + window - 1) / window; }

static uint64_t address(const void *data) { return (uint64_t)(uintptr_t)data; }

/* Copies from the tensor of another rank in shared memory. */
static void pull(struct frd_group *g, int rank, void *to, uint64_t from, size_t bytes)
{
    if (bytes) memcpy(to, memory_of(g->local[rank].peer, from, bytes), bytes);
}

/* Copies to the tensor of another rank in shared memory. */
static void push(struct frd_group *g, int rank, uint64_t to, const void *from, size_t bytes)
{
    if (bytes) memcpy(memory_of(g->local[rank].peer, to, bytes), from, bytes);
}

int frd_barrier(struct frd_group *g, int flags)
{
    begin_call(g, (struct frd_call){.operation = FRD_BARRIER, .root = -1}, flags);
    return agree(g);
}

/* ---- one stream for several receivers ---- */

struct spread {
    const char *own;                 /* this rank's stream, NULL if it has none */
    char *wanted[FRD_MAX_RANKS];     /* destination of rank r's stream; NULL: not needed */
    size_t bytes[FRD_MAX_RANKS];     /* of rank r's stream */
};

static size_t longest_stream(const struct frd_group *g, const struct spread *x)
{
    size_t longest = 0;
    for (int r = 0; r < g->ranks; r++)
        if (x->bytes[r] > longest) longest = x->bytes[r];
    return longest;
}

static void take_streams(struct frd_group *g, const struct spread *x, size_t step)
{
    const int half = half_of(g->phase);
    for (int r = 0; r < g->ranks; r++) {
        if (r == g->rank || !x->wanted[r]) continue;
        const size_t bytes = window_bytes(x->bytes[r], step, STAGE_BYTES);
        if (bytes) memcpy(x->wanted[r] + step * STAGE_BYTES, offer_of(g, r, !half), bytes);
    }
}

static void offer_stream(struct frd_group *g, const struct spread *x, size_t step)
{
    const size_t bytes = x->own ? window_bytes(x->bytes[g->rank], step, STAGE_BYTES) : 0;
    if (bytes) memcpy(offer_of(g, g->rank, half_of(g->phase)), x->own + step * STAGE_BYTES, bytes);
}

/* `offered`: the first window arrived with the call. */
static int spread_in_windows(struct frd_group *g, const struct spread *x, bool offered)
{
    const size_t windows = windows_in(longest_stream(g, x), STAGE_BYTES);
    for (size_t step = offered; step < windows; step++) {
        offer_stream(g, x, step);
        if (step) take_streams(g, x, step - 1);
        const int status = end_phase(g);
        if (status) return status;
    }
    if (windows) take_streams(g, x, windows - 1);
    return FRD_OK;
}

static int pull_streams(struct frd_group *g, const struct spread *x)
{
    for (int step = 1; step < g->ranks; step++) { /* each rank starts with a different peer */
        const int r = (g->rank + step) % g->ranks;
        if (x->wanted[r]) pull(g, r, x->wanted[r], call_of(g, r)->source, x->bytes[r]);
    }
    return end_phase(g); /* after this phase the sources may be changed */
}

/* Copies this rank's stream into the results of all ranks, which are in shared memory. */
static int push_stream(struct frd_group *g, const struct spread *x, char *const *targets)
{
    size_t before_mine = 0;
    for (int r = 0; r < g->rank; r++) before_mine += x->bytes[r];
    for (int step = 1; step < g->ranks; step++) /* at each step the ranks write to different tensors */
        memcpy(targets[(g->rank + step) % g->ranks] + before_mine, x->own, x->bytes[g->rank]);
    return end_phase(g);
}

/* Moves the streams, after the ranks have agreed on the call. */
static int move_streams(struct frd_group *g, const struct spread *x, size_t target_bytes)
{
    bool pulled = true, offered = true;
    for (int r = 0; r < g->ranks; r++) {
        const struct frd_call *call = call_of(g, r);
        pulled &= call->source || !x->bytes[r];
        offered &= !call->source && !call->target;
    }
    char *targets[FRD_MAX_RANKS];
    if (pulled) return pull_streams(g, x);
    if (target_bytes && find_targets(g, target_bytes, targets)) return push_stream(g, x, targets);
    return spread_in_windows(g, x, offered);
}

/* `target`: the tensor that receives the streams of all ranks contiguously; NULL if they have separate destinations. */
static int spread(struct frd_group *g, struct frd_call call, const struct spread *x, void *target, int flags)
{
    const int me = g->rank;
    const size_t longest = longest_stream(g, x);
    size_t total = 0;
    for (int r = 0; r < g->ranks; r++) total += x->bytes[r];
    if (longest > SMALL_BYTES) {
        if (x->own) call.source = address_if_shared(x->own, x->bytes[me]);
        if (target) call.target = address_if_shared(target, total);
    }
    if (x->own && x->bytes[me] > PAYLOAD_BYTES && !acquire_stage(g)) return FRD_NO_MEMORY;
    begin_call(g, call, flags);
    if (!call.source && !call.target) offer_stream(g, x, 0);
    int status = agree(g);
    if (!status) status = move_streams(g, x, target ? total : 0);
    if (longest > PAYLOAD_BYTES) release_stage(g, !status);
    if (!status) copy_unless_same(x->wanted[me], x->own, x->bytes[me]);
    return status;
}

int frd_broadcast(struct frd_group *g, void *data, size_t count, int type, int root, int flags)
{
    if (!is_rank(root, g->ranks)) return FRD_INVALID;
    const struct frd_call call = {.operation = FRD_BROADCAST, .type = (uint32_t)type, .root = root, .count = count};
    struct spread x = {.own = g->rank == root ? data : NULL};
    x.bytes[root] = count * element_bytes(type);
    if (g->rank != root) x.wanted[root] = data;
    return spread(g, call, &x, NULL, flags);
}

int frd_gather(struct frd_group *g, const void *in, void *const *out, size_t count, int type, int root, int flags)
{
    if (!is_rank(root, g->ranks)) return FRD_INVALID;
    const struct frd_call call = {.operation = FRD_GATHER, .type = (uint32_t)type, .root = root, .count = count};
    struct spread x = {.own = in};
    for (int r = 0; r < g->ranks; r++) {
        x.bytes[r] = count * element_bytes(type);
        if (g->rank == root) x.wanted[r] = out[r];
    }
    return spread(g, call, &x, NULL, flags);
}

/* `target`: the start of the parts of `out` if the parts are contiguous; else NULL. */
static int all_gather(struct frd_group *g, const void *in, void *const *out, const size_t *counts, int type,
                      int flags, void *target)
{
    struct spread x = {.own = in};
    size_t total = 0;
    for (int r = 0; r < g->ranks; r++) {
        x.bytes[r] = counts[r] * element_bytes(type);
        x.wanted[r] = out[r];
        total += counts[r];
    }
    const struct frd_call call = {.operation = FRD_ALL_GATHER, .type = (uint32_t)type, .root = -1, .count = total,
                                  .layout = fingerprint(counts, g->ranks)};
    return spread(g, call, &x, target, flags);
}

int frd_all_gather(struct frd_group *g, const void *in, void *const *out, const size_t *counts, int type, int flags)
{
    return all_gather(g, in, out, counts, type, flags, NULL);
}

int frd_all_gather_even(struct frd_group *g, const void *in, void *out, size_t count, int type, int flags)
{
    void *parts[FRD_MAX_RANKS];
    size_t counts[FRD_MAX_RANKS];
    for (int r = 0; r < g->ranks; r++) {
        parts[r] = (char *)out + (size_t)r * count * element_bytes(type);
        counts[r] = count;
    }
    return all_gather(g, in, parts, counts, type, flags, out);
}

/* ---- a separate stream for every other rank ---- */

struct delivery {
    const char *out[FRD_MAX_RANKS];    /* for rank d; NULL: none */
    size_t out_bytes[FRD_MAX_RANKS];
    char *in[FRD_MAX_RANKS];           /* from rank s; NULL: none */
    size_t in_bytes[FRD_MAX_RANKS];
    size_t longest;                    /* bytes of the longest stream between two different ranks */
};

/* Moves the streams, after the ranks have agreed on the call. */
static int deliver_in_windows(struct frd_group *g, const struct delivery *x)
{
    const int me = g->rank;
    const size_t window = window_of(g), windows = windows_in(x->longest, window);
    for (size_t step = 0; step <= windows; step++) {
        const int half = half_of(g->phase);
        for (int d = 0; d < g->ranks && step < windows; d++) {
            const size_t bytes = d == me ? 0 : window_bytes(x->out_bytes[d], step, window);
            if (bytes) memcpy(offer_of(g, me, half) + (size_t)d * window, x->out[d] + step * window, bytes);
        }
        for (int s = 0; s < g->ranks && step; s++) {
            const size_t bytes = s == me ? 0 : window_bytes(x->in_bytes[s], step - 1, window);
            const char *from = offer_of(g, s, !half) + (size_t)me * window;
            if (bytes) memcpy(x->in[s] + (step - 1) * window, from, bytes);
        }
        if (step == windows) break;
        const int status = end_phase(g);
        if (status) return status;
    }
    return FRD_OK;
}

int frd_scatter(struct frd_group *g, const void *const *in, void *out, size_t count, int type, int root, int flags)
{
    if (!is_rank(root, g->ranks)) return FRD_INVALID;
    const int me = g->rank;
    const size_t bytes = count * element_bytes(type), total = bytes * (size_t)g->ranks;
    const bool small = total <= SMALL_BYTES;
    struct frd_call call = {.operation = FRD_SCATTER, .type = (uint32_t)type, .root = root, .count = count};
    bool shared = !small && me == root;
    for (int d = 0; d < g->ranks && shared; d++) shared = is_shared(in[d], bytes);
    if (shared) call.source = address(in[0]); /* announces that all parts are in shared memory */
    const size_t offered = small ? total : STAGE_BYTES;
    if (me == root && offered > PAYLOAD_BYTES && !acquire_stage(g)) return FRD_NO_MEMORY;
    begin_call(g, call, flags);
    char *offer = offer_of(g, me, half_of(g->phase));
    for (int d = 0; d < g->ranks && me == root; d++) {
        if (small) memcpy(offer + (size_t)d * bytes, in[d], bytes);
        else if (shared) ((uint64_t *)offer)[d] = address(in[d]);
    }
    int status = agree(g);
    const char *theirs = offer_of(g, root, half_of(g->phase - 1));
    if (!status && small) {
        memcpy(out, theirs + (size_t)me * bytes, bytes);
    } else if (!status && call_of(g, root)->source) {
        if (me != root) pull(g, root, out, ((const uint64_t *)theirs)[me], bytes);
        status = end_phase(g);
    } else if (!status) {
        struct delivery x = {.longest = bytes};
        for (int d = 0; d < g->ranks && me == root; d++) x.out[d] = in[d], x.out_bytes[d] = bytes;
        x.in[root] = out;
        x.in_bytes[root] = bytes;
        status = deliver_in_windows(g, &x);
    }
    if (offered > PAYLOAD_BYTES) release_stage(g, !status);
    if (!status && me == root) copy_unless_same(out, in[me], bytes);
    return status;
}

/* The numbers of elements that a rank sends to each rank and expects from each rank, and the addresses of the parts
 * that are in shared memory.  Up to SMALL_BYTES bytes of values follow. */
struct table {
    uint64_t *sends, *receives, *sources, *targets;
    char *values;
};

static struct table table_at(const struct frd_group *g, char *offer)
{
    const size_t n = (size_t)g->ranks;
    uint64_t *words = (uint64_t *)offer;
    return (struct table){words, words + n, words + 2 * n, words + 3 * n, (char *)(words + 4 * n)};
}

/* The number of bytes that a rank sends to all other ranks with numbers less than `before`. */
static size_t bytes_sent(const struct table *table, int rank, int before, size_t element)
{
    size_t count = 0;
    for (int d = 0; d < before; d++) count += d == rank ? 0 : table->sends[d];
    return count * element;
}

/* Breaks the group if a rank sends more or fewer elements than its peer expects; reports the first such pair. */
static int check_pairs(struct frd_group *g, const struct table *tables, size_t *longest, bool *few)
{
    for (int from = 0; from < g->ranks; from++) {
        for (int to = 0; to < g->ranks; to++) {
            const uint64_t sent = tables[from].sends[to];
            if (sent != tables[to].receives[from]) {
                struct frd_call call = g->current;
                call.count = sent;
                call.layout = tables[to].receives[from];
                call.root = g->rank_of[to];
                return break_group(g, FRD_COUNT_MISMATCH, g->rank_of[from], &call);
            }
            if (from != to && sent > *longest) *longest = sent;
        }
        few[from] = bytes_sent(&tables[from], from, g->ranks, element_bytes((int)g->current.type)) <= SMALL_BYTES;
    }
    return FRD_OK;
}

/* Whether every part that does not fit into a table is in shared memory at its source or at its target.  Every rank
 * sees the same tables. */
static bool needs_no_stage(const struct frd_group *g, const struct table *tables, const bool *few)
{
    for (int s = 0; s < g->ranks; s++)
        for (int d = 0; d < g->ranks && !few[s]; d++)
            if (s != d && tables[s].sends[d] && !tables[s].sources[d] && !tables[d].targets[s]) return false;
    return true;
}

int frd_all_to_all(struct frd_group *g, const void *const *in, const size_t *in_counts, void *const *out,
                   const size_t *out_counts, int type, int flags)
{
    const int me = g->rank;
    const size_t element = element_bytes(type), table_bytes = 4 * sizeof(uint64_t) * (size_t)g->ranks;
    size_t sent = 0;
    for (int d = 0; d < g->ranks; d++) sent += d == me ? 0 : in_counts[d] * element;
    const bool small = sent <= SMALL_BYTES;
    if (table_bytes + sent > PAYLOAD_BYTES && !acquire_stage(g)) return FRD_NO_MEMORY;
    begin_call(g, (struct frd_call){.operation = FRD_ALL_TO_ALL, .type = (uint32_t)type, .root = -1}, flags);
    struct table tables[FRD_MAX_RANKS];
    tables[me] = table_at(g, offer_of(g, me, half_of(g->phase)));
    char *values = tables[me].values;
    for (int r = 0; r < g->ranks; r++) {
        tables[me].sends[r] = in_counts[r];
        tables[me].receives[r] = out_counts[r];
        tables[me].sources[r] = address_if_shared(in[r], in_counts[r] * element);
        tables[me].targets[r] = address_if_shared(out[r], out_counts[r] * element);
        const size_t bytes = small && r != me ? in_counts[r] * element : 0;
        if (bytes) memcpy(values, in[r], bytes);
        values += bytes;
    }
    int status = agree(g);
    struct delivery x = {.longest = 0};
    bool few[FRD_MAX_RANKS], all_few = true;
    for (int r = 0; r < g->ranks && !status; r++) tables[r] = table_at(g, offer_of(g, r, half_of(g->phase - 1)));
    if (!status) status = check_pairs(g, tables, &x.longest, few);
    x.longest *= element;
    const bool direct = !status && needs_no_stage(g, tables, few);
    for (int r = 0; r < g->ranks && !status; r++) {
        const size_t in_bytes = r == me ? 0 : out_counts[r] * element;
        const size_t out_bytes = small || r == me ? 0 : in_counts[r] * element;
        all_few &= few[r];
        if (few[r] && in_bytes) memcpy(out[r], tables[r].values + bytes_sent(&tables[r], r, me, element), in_bytes);
        else if (!direct) x.in[r] = out[r], x.in_bytes[r] = few[r] ? 0 : in_bytes;
        else if (tables[r].sources[me]) pull(g, r, out[r], tables[r].sources[me], in_bytes);
        if (!direct) x.out[r] = in[r], x.out_bytes[r] = out_bytes;
        else if (!tables[me].sources[r]) push(g, r, tables[r].targets[me], in[r], out_bytes);
    }
    if (!status && !all_few) status = direct ? end_phase(g) : deliver_in_windows(g, &x);
    release_stage(g, !status);
    if (!status) copy_unless_same(out[me], in[me], in_counts[me] * element);
    return status;
}

int frd_all_to_all_even(struct frd_group *g, const void *in, void *out, size_t count, int type, int flags)
{
    const void *sources[FRD_MAX_RANKS];
    void *targets[FRD_MAX_RANKS];
    size_t counts[FRD_MAX_RANKS];
    for (int r = 0; r < g->ranks; r++) {
        sources[r] = (const char *)in + (size_t)r * count * element_bytes(type);
        targets[r] = (char *)out + (size_t)r * count * element_bytes(type);
        counts[r] = count;
    }
    return frd_all_to_all(g, sources, counts, targets, counts, type, flags);
}
