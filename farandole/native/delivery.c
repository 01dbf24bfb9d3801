/* Messages as the caller sees them: post, then test or wait, then release.
 *
 * Whoever waits moves everybody's data along.  While nobody waits a thread sees to the rings, and another
 * one (in wire.c) to the wires.
 */
#define _GNU_SOURCE
#include <stdlib.h>

#include "internal.h"

#define SPINS 200
#define YIELDS 40
#define SLICE_S 0.010
#define INSPECTION_S 0.050
#define NEVER_S 1e300

/* Moves all that can be moved; the lock is held. */
static bool progress(struct frd_group *g)
{
    bool moved = false;
    for (int r = 0; r < g->mail.ranks; r++) {
        struct peer *peer = &g->mail.peers[r];
        if (peer->sends) moved |= push(g, peer);
        if (g->mail.receives || peer->inbox.under_way) moved |= pull(g, peer);
    }
    return moved;
}

/* ---- the thread that sees to the rings ---- */

static void *rings_main(void *group)
{
    struct frd_group *g = group;
    struct mail *mail = &g->mail;
    struct rank_line *line = &g->lines[g->rank];
    pthread_mutex_lock(&mail->lock);
    while (!mail->stopping) {
        if (!mail->in_background) {
            pthread_cond_wait(&mail->work, &mail->lock);
            continue;
        }
        const uint32_t heard = atomic_load(&line->doorbell.rings);
        const bool moved = progress(g);
        pthread_mutex_unlock(&mail->lock);
        if (!moved) sleep_while(&line->doorbell.rings, heard, &line->doorbell.sleepers, SLICE_S);
        pthread_mutex_lock(&mail->lock);
    }
    pthread_mutex_unlock(&mail->lock);
    return NULL;
}

/* A message that only a wire can complete is left to the thread of the wires. */
static bool needs_rings(const struct mail *mail, const struct frd_message *m)
{
    return m->peer < 0 || mail->peers[m->peer].local >= 0;
}

static void see_to_in_background(struct frd_group *g, struct frd_message *m)
{
    struct mail *mail = &g->mail;
    if (!needs_rings(mail, m)) return;
    m->in_background = true;
    mail->in_background++;
    if (!mail->thread_runs) mail->thread_runs = pthread_create(&mail->thread, NULL, rings_main, g) == 0;
    pthread_cond_signal(&mail->work);
}

/* ---- opening and closing ---- */

int mail_open(struct frd_group *g, int rank, int ranks, const int *local_of)
{
    struct mail *mail = &g->mail;
    struct peer *peers = calloc((size_t)ranks, sizeof *peers);
    if (!peers) return -1;
    free(mail->peers);
    mail->rank = rank;
    mail->ranks = ranks;
    mail->peers = peers;
    for (int r = 0; r < ranks; r++) {
        const int local = local_of ? local_of[r] : r;
        peers[r].rank = r;
        peers[r].local = local;
        if (local < 0) continue;
        g->rank_of[local] = r;
        peers[r].outward = &g->rings[g->rank * g->ranks + local];
        peers[r].inward = &g->rings[local * g->ranks + g->rank];
    }
    return 0;
}

void mail_close(struct frd_group *g)
{
    struct mail *mail = &g->mail;
    wires_stop(g);
    pthread_mutex_lock(&mail->lock);
    mail->stopping = true;
    pthread_cond_signal(&mail->work);
    pthread_mutex_unlock(&mail->lock);
    if (mail->thread_runs) pthread_join(mail->thread, NULL);
    for (int r = 0; r < mail->ranks; r++) {
        for (struct stray *stray = mail->peers[r].inbox.strays, *next; stray; stray = next) {
            next = stray->next;
            free(stray);
        }
    }
    free(mail->peers);
    pthread_cond_destroy(&mail->work);
    pthread_mutex_destroy(&mail->lock);
}

/* ---- posting ---- */

static struct frd_message *new_message(struct frd_group *g, bool sends, void *data, size_t bytes, int type, int peer,
                                       int tag)
{
    struct frd_message *m = calloc(1, sizeof *m);
    if (!m) return NULL;
    m->sends = sends;
    m->status = FRD_PENDING;
    m->data = data;
    m->bytes = bytes;
    m->type = type;
    m->peer = m->source = peer;
    m->tag = tag;
    m->envelope = (struct envelope){.bytes = bytes, .tag = tag, .type = (uint32_t)type};
    m->inspected = seconds_now();
    if (tag >= 0) g->lines[g->rank].message_call = call_of_message(g, m);
    return m;
}

struct frd_message *frd_post_send(struct frd_group *g, const void *data, size_t bytes, int type, int peer, int tag,
                                  int in_background)
{
    pthread_mutex_lock(&g->mail.lock);
    struct frd_message *m = new_message(g, true, (void *)data, bytes, type, peer, tag);
    if (m) {
        append_message(&g->mail.peers[peer].sends, m);
        push(g, &g->mail.peers[peer]);
        if (in_background && m->status == FRD_PENDING) see_to_in_background(g, m);
    }
    pthread_mutex_unlock(&g->mail.lock);
    return m;
}

struct frd_message *frd_post_recv(struct frd_group *g, void *data, size_t bytes, int type, int peer, int tag,
                                  int in_background)
{
    pthread_mutex_lock(&g->mail.lock);
    struct frd_message *m = new_message(g, false, data, bytes, type, peer, tag);
    if (m) {
        append_message(&g->mail.receives, m);
        claim_stray(g, m);
        for (int r = 0; r < g->mail.ranks; r++)
            if (m->status == FRD_PENDING && could_take(m, r)) pull(g, &g->mail.peers[r]);
        if (in_background && m->status == FRD_PENDING) see_to_in_background(g, m);
    }
    pthread_mutex_unlock(&g->mail.lock);
    return m;
}

/* ---- waiting ---- */

static int move_along(struct frd_group *g, struct frd_message *m)
{
    pthread_mutex_lock(&g->mail.lock);
    if (m->status == FRD_PENDING) progress(g);
    const int status = m->status;
    pthread_mutex_unlock(&g->mail.lock);
    return status;
}

/* How a rank ended, if it did: FRD_LEFT or FRD_DIED on this host, FRD_CLOSED on another. */
static int end_of(struct frd_group *g, const struct peer *peer)
{
    if (peer->local < 0) return wire_has_ended(peer) ? FRD_CLOSED : FRD_OK;
    if (atomic_load(&g->lines[peer->local].life.state) == GONE) return FRD_LEFT;
    if (!has_ended(g, peer->local)) return FRD_OK;
    /* a normal end may have been announced between the two looks */
    return atomic_load(&g->lines[peer->local].life.state) == GONE ? FRD_LEFT : FRD_DIED;
}

/* Have all ranks ended that could complete the message?  Then how, and which was the last. */
static int end_of_peers(struct frd_group *g, const struct frd_message *m, int *gone)
{
    int end = FRD_OK;
    for (int r = 0; r < g->mail.ranks; r++) {
        if (r == g->mail.rank || (m->peer >= 0 && r != m->peer)) continue;
        end = end_of(g, &g->mail.peers[r]);
        if (!end) return FRD_OK; /* somebody can still answer */
        *gone = r;
    }
    return end;
}

/* Has something happened after which the message will never be complete?  FRD_OK if not. */
static int inspect(struct frd_group *g, struct frd_message *m, double deadline, int flags)
{
    const struct frd_call call = call_of_message(g, m);
    m->inspected = seconds_now();
    int gone = 0;
    const int end = end_of_peers(g, m, &gone);
    /* what a rank sent before it ended still counts, so look at the streams after its end was seen */
    const int moved = move_along(g, m);
    if (moved != FRD_PENDING) return moved;
    const int status = broken_status(g);
    if (status) return status;
    if (atomic_load(&g->given_up)) return break_group(g, FRD_LEFT, g->mail.rank, &call);
    if (end) return break_group(g, end, gone, &call);
    if (flags & FRD_MAIN_THREAD && interrupted()) {
        break_group(g, FRD_INTERRUPTED, g->mail.rank, &call);
        return FRD_INTERRUPTED;
    }
    if (m->inspected < deadline) return FRD_OK;
    if (flags & FRD_TRY) return FRD_PENDING;
    return break_group(g, FRD_LATE, m->peer >= 0 ? m->peer : (g->mail.rank + 1) % g->mail.ranks, &call);
}

int frd_message_test(struct frd_group *g, struct frd_message *m)
{
    const int status = move_along(g, m);
    if (status != FRD_PENDING || seconds_now() < m->inspected + INSPECTION_S) return status;
    const int failed = inspect(g, m, NEVER_S, 0);
    return failed ? failed : move_along(g, m);
}

int frd_message_wait(struct frd_group *g, struct frd_message *m, double timeout, int flags)
{
    struct rank_line *line = &g->lines[g->rank];
    const double deadline = seconds_now() + timeout;
    m->inspected = seconds_now();
    for (int turn = 0;; turn++) {
        const uint32_t heard = atomic_load(&line->doorbell.rings);
        int status = move_along(g, m);
        if (status != FRD_PENDING) return status;
        if (turn < SPINS && !(flags & FRD_BACKGROUND)) {
            relax();
            continue;
        }
        if (turn < SPINS + YIELDS) {
            yield_core(g);
            continue;
        }
        sleep_while(&line->doorbell.rings, heard, &line->doorbell.sleepers, SLICE_S);
        if (seconds_now() < m->inspected + INSPECTION_S) continue;
        status = inspect(g, m, deadline, flags);
        if (status) return status;
    }
}

int frd_message_source(const struct frd_message *m) { return m->source; }

void frd_message_release(struct frd_group *g, struct frd_message *m)
{
    struct mail *mail = &g->mail;
    pthread_mutex_lock(&mail->lock);
    if (m->status == FRD_PENDING) { /* given up */
        const struct frd_call call = call_of_message(g, m);
        if (m->started) break_group(g, FRD_INTERRUPTED, mail->rank, &call);
        if (m->started && m->sends) mail->peers[m->peer].sends_torn = true;
        for (int r = 0; r < mail->ranks; r++) {
            struct inbox *inbox = &mail->peers[r].inbox;
            if (inbox->under_way && inbox->receive == m) inbox->torn = true;
            for (struct stray *s = inbox->strays; s; s = s->next)
                if (s->claimed_by == m) s->claimed_by = NULL;
        }
        unlink_message(m->sends ? &mail->peers[m->peer].sends : &mail->receives, m);
        finish(g, m, FRD_INTERRUPTED);
    }
    pthread_mutex_unlock(&mail->lock);
    free(m);
}
