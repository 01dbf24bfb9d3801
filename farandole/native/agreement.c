/* Before the ranks use any data, they verify that they are in the same call.
 *
 * Every rank posts its call in its line, ends the phase, and compares the calls of all ranks.  The call is in the half
 * of the line that belongs to the first phase, so the rule in internal.h applies to it.  Every rank sees the same
 * calls, so all ranks reach the same result.  Data that a rank has put into its payload or staging slot in the same
 * phase are available with the call.
 */
#include <string.h>

#include "internal.h"
#include "messages.h"

void begin_call(struct frd_group *g, struct frd_call call, int flags)
{
    if (g->declared.operation) { /* part of a larger call, which error messages name */
        const struct frd_call part = call;
        call = g->declared;
        call.stage = part.stage;
        call.source = part.source;
        call.target = part.target;
    } else {
        call.index = ++g->calls;
    }
    g->flags = flags;
    g->begun = seconds_now();
    g->deadline = g->begun + g->call_timeout;
    g->warn_at = g->begun + STALL_WARNING_S;
    if (g->slot) call.stage = 1 + arena_offset(g->slot->memory);
    g->current = call;
    g->line->call[half_of(g->phase)] = call;
}

static bool same_call(const struct frd_call *a, const struct frd_call *b)
{
    return a->index == b->index && a->operation == b->operation && a->type == b->type && a->op == b->op &&
           a->root == b->root && a->count == b->count && a->layout == b->layout;
}

const struct frd_call *call_of(const struct frd_group *g, int rank)
{
    return &g->local[rank].block->line.call[half_of(g->phase - 1)];
}

/* The culprit: the first rank outside the largest set of equal calls; in a group of two, the second rank. */
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
        const struct frd_call *call = call_of(g, r);
        if (same_call(call, &g->current)) {
            g->local[r].stage = call->stage ? g->local[r].peer->arena + call->stage - 1 : NULL;
            continue;
        }
        const int culprit = odd_one_out(g);
        /* the record contains the culprit's call and the call of a rank in the largest set */
        const int witness = culprit == g->rank ? r : g->rank;
        return break_group(g, FRD_MISMATCH, g->rank_of[culprit], call_of(g, witness));
    }
    return FRD_OK;
}

bool find_sources(struct frd_group *g, size_t bytes, char **sources)
{
    for (int r = 0; r < g->ranks; r++)
        if (!(sources[r] = memory_of(g->local[r].peer, call_of(g, r)->source, bytes))) return false;
    return true;
}

bool find_targets(struct frd_group *g, size_t bytes, char **targets)
{
    for (int r = 0; r < g->ranks; r++)
        if (!(targets[r] = memory_of(g->local[r].peer, call_of(g, r)->target, bytes))) return false;
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
