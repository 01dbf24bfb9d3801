/* A group fails once.  The first rank that detects a failure records it for all other ranks of its host, and every
 * later call on the group fails with the same reason. */
#include <string.h>
#include <time.h>

#include "internal.h"

/* The last call of a rank: the newer of its two collectives, or a later message. */
static struct frd_call last_call(const struct rank_line *line)
{
    const struct frd_call *a = &line->call[0], *b = &line->call[1], *m = &line->message_call;
    const struct frd_call *newer = a->index > b->index ? a : b;
    return m->operation && m->index >= newer->index ? *m : *newer;
}

static int ranks_missing(const struct frd_group *g)
{
    int missing = 0;
    for (int r = 0; r < g->ranks; r++)
        missing += atomic_load(&g->local[r].block->line.phase) < g->phase;
    return missing;
}

/* The line of a rank of the whole group; NULL for a rank on another host. */
static const struct rank_line *line_of(const struct frd_group *g, int rank)
{
    const int local = g->members[rank].local;
    return local < 0 ? NULL : &g->local[local].block->line;
}

int break_between(struct frd_group *g, int status, int culprit, const struct frd_call *theirs, const struct frd_call *own)
{
    if (g->context == 0) return status; /* errors of this group concern only the caller */
    struct group_block *first = g->local[0].block;
    uint32_t whole = WHOLE;
    if (atomic_compare_exchange_strong(&first->record.broken, &whole, BREAKING)) {
        const struct rank_line *line = line_of(g, culprit);
        struct frd_failure *failure = &first->record.failure;
        failure->status = (uint32_t)status;
        failure->culprit = culprit;
        failure->reporter = g->group_rank;
        failure->missing = ranks_missing(g);
        failure->timeout = own->operation == FRD_SEND || own->operation == FRD_RECV ? g->timeout : g->call_timeout;
        failure->culprit_call = *theirs;
        failure->reporter_call = *own;
        if (line) memcpy(failure->note, line->life.note, FRD_NOTE_BYTES);
        atomic_store(&first->record.broken, BROKEN);
    }
    return broken_status(g);
}

int break_group(struct frd_group *g, int status, int culprit, const struct frd_call *own)
{
    const struct rank_line *line = line_of(g, culprit);
    const struct frd_call theirs = line ? last_call(line) : (struct frd_call){0};
    return break_between(g, status, culprit, &theirs, own);
}

void frd_break(struct frd_group *g, int culprit) { break_group(g, FRD_ELSEWHERE, culprit, &g->current); }

int broken_status(struct frd_group *g)
{
    struct group_block *first = g->local[0].block;
    if (atomic_load(&first->record.broken) == WHOLE) return FRD_OK;
    /* Writing the record takes a microsecond, or longer if the writer must wait for a crowded core.  If the writer was
     * killed, the fields that it has not written are zero. */
    for (int i = 0; i < 1000 && atomic_load(&first->record.broken) != BROKEN; i++) {
        const struct timespec a_millisecond = {0, 1000000};
        nanosleep(&a_millisecond, NULL);
    }
    /* a peer may still access a buffer of this process */
    if (!atomic_exchange(&g->seen_broken, true)) arena_hold(1);
    const int status = (int)first->record.failure.status;
    return status ? status : FRD_DIED;
}

void frd_get_failure(struct frd_group *g, struct frd_failure *failure)
{
    broken_status(g);
    *failure = g->local[0].block->record.failure;
}

bool frd_get_wait(struct frd_group *g, int local_rank, struct frd_call *call)
{
    const struct rank_line *line = &g->local[local_rank].block->line;
    *call = line->message_call;
    return atomic_load(&line->waits);
}

void frd_get_call(struct frd_group *g, int local_rank, struct frd_call *call)
{
    *call = last_call(&g->local[local_rank].block->line);
}
