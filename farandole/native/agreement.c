/* Before any data are used, the ranks see that they are in the same call.
 *
 * Every rank posts its call in its line (in the half of the first phase, so the rule of internal.h covers
 * it), ends the phase, and compares.  Every rank sees the same calls, so all come to the same verdict.
 */
#include <string.h>

#include "internal.h"

void begin_call(struct frd_group *g, struct frd_call call, int flags)
{
    if (g->declared.operation) { /* a part of a larger call, by which people know it */
        const struct frd_call part = call;
        call = g->declared;
        call.region = part.region;
        call.offset = part.offset;
    } else {
        call.index = ++g->calls;
    }
    g->flags = flags;
    g->begun = seconds_now();
    g->deadline = g->begun + g->timeout;
    g->remark_at = g->begun + PATIENCE_S;
    g->current = call;
    g->lines[g->rank].call[half_of(g->phase)] = call;
}

void locate(struct frd_group *g, struct frd_call *call, struct region *region, const void *data, size_t bytes)
{
    *region = g->region_count ? find_region(g, data, bytes) : (struct region){0, NULL, 0};
    if (!region->base) return;
    call->region = region->number + 1;
    call->offset = (uint64_t)((const char *)data - (region->base + (size_t)g->rank * region->stride));
}

static bool same_call(const struct frd_call *a, const struct frd_call *b)
{
    return a->index == b->index && a->operation == b->operation && a->type == b->type && a->op == b->op &&
           a->root == b->root && a->count == b->count && a->layout == b->layout;
}

static const struct frd_call *call_of(const struct frd_group *g, int rank)
{
    return &g->lines[rank].call[half_of(g->phase - 1)];
}

/* The rank to name: the first outside the largest party; with two ranks that disagree, the second. */
static int odd_one_out(const struct frd_group *g)
{
    int most = 0, model = 0;
    for (int a = 0; a < g->ranks; a++) {
        int votes = 0;
        for (int b = 0; b < g->ranks; b++) votes += same_call(call_of(g, a), call_of(g, b));
        if (votes > most) most = votes, model = a;
    }
    for (int r = 0; r < g->ranks; r++)
        if (!same_call(call_of(g, model), call_of(g, r))) return r;
    return model;
}

int agree(struct frd_group *g)
{
    int status = broken_status(g);
    if (status) return status;
    if ((status = end_phase(g))) return status;
    for (int r = 0; r < g->ranks; r++) {
        if (same_call(call_of(g, r), &g->current)) continue;
        const int culprit = odd_one_out(g);
        /* the record shows the culprit's call beside one that it should have been */
        const int witness = culprit == g->rank ? r : g->rank;
        return break_group(g, FRD_MISMATCH, g->rank_of[culprit], call_of(g, witness));
    }
    return FRD_OK;
}

bool all_in_region(const struct frd_group *g)
{
    for (int r = 0; r < g->ranks; r++) {
        const struct frd_call *call = call_of(g, r);
        if (!call->region || call->region != g->current.region || call->offset != g->current.offset) return false;
    }
    return true;
}

int frd_declare(struct frd_group *g, const struct frd_call *call, int flags)
{
    begin_call(g, *call, flags);
    const int status = agree(g);
    if (!status) g->declared = g->current;
    return status;
}

void frd_undeclare(struct frd_group *g) { g->declared.operation = FRD_NOTHING; }
