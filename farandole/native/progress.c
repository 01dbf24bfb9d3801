/* The caller's interface to messages: post, then test or wait.
 *
 * A waiting thread advances all messages of its endpoint.  While no thread waits, the progress thread advances them.
 * The progress thread first checks at short intervals, because most messages soon have a waiting thread.  Then it
 * sleeps until another process rings the bell or a socket is ready.  Without pending messages it sleeps until one is
 * posted.
 */
#define _GNU_SOURCE
#include <stdlib.h>

#include "messages.h"

#define SPINS 2000
#define YIELDS 40
#define SLICE_S 0.010
#define INSPECTION_S 0.050
#define NAP_S 200e-6        /* between two checks of the progress thread */
#define LINGER_S 0.0005      /* for this time after the last event, the thread checks every NAP_S */
#define LONG_NAP_S 1e-3     /* later interval if the thread waits for sockets and therefore not for the bell */
#define FOREVER_S 3600.0
#define CROWDED_WAITS 64    /* waits without spinning after a yield that ran another thread */

/* Progresses the streams of the processes that have rung the bell; the lock is held. */
bool progress(struct frd_endpoint *e)
{
    bool moved = false;
    for (int w = 0; w * 64 < e->locals; w++) {
        _Atomic uint64_t *word = &e->block->bell.ready[w];
        if (!atomic_load_explicit(word, memory_order_relaxed)) continue;
        for (uint64_t ready = atomic_exchange(word, 0); ready; ready &= ready - 1) {
            struct peer *peer = &e->peers[e->local_peers[w * 64 + __builtin_ctzll(ready)]];
            if (peer->sends.first) moved |= push(peer);
            moved |= pull(peer);
        }
    }
    return moved;
}

/* ---- the progress thread ---- */

/* Waits for an event, for at most `seconds`; the lock is not held. */
static void rest(struct frd_endpoint *e, uint32_t events, uint32_t naps, double seconds, bool until_bell)
{
    struct process_block *block = e->block;
    if (e->tcp) {
        tcp_wait(e, until_bell ? LONG_NAP_S : seconds);
    } else if (until_bell) {
        atomic_store(&block->bell.thread_sleeps, 1);
        if (atomic_load(&block->bell.events) == events) futex_wait(&block->bell.events, events, seconds);
        atomic_store(&block->bell.thread_sleeps, 0);
    } else if (atomic_load(&e->naps) == naps) {
        futex_wait(&e->naps, naps, seconds);
    }
}

static void *thread_main(void *endpoint)
{
    struct frd_endpoint *e = endpoint;
    struct process_block *block = e->block;
    double active = seconds_now();
    pthread_mutex_lock(&e->lock);
    while (!e->stopping) {
        const uint32_t events = atomic_load(&block->bell.events), naps = atomic_load(&e->naps);
        bool moved = false;
        if (e->in_background && !atomic_load(&block->bell.attended)) {
            moved = progress(e);
        }
        const double now = seconds_now();
        if (moved) active = now;
        const bool recent = now < active + LINGER_S;
        const double seconds = recent ? NAP_S : e->in_background ? SLICE_S : FOREVER_S;
        const bool until_bell = !recent && e->in_background;
        e->thread_deep_asleep = !recent && !e->in_background;
        pthread_mutex_unlock(&e->lock);
        if (!moved) rest(e, events, naps, seconds, until_bell);
        pthread_mutex_lock(&e->lock);
        if (e->thread_deep_asleep) active = seconds_now();
        e->thread_deep_asleep = false;
    }
    pthread_mutex_unlock(&e->lock);
    return NULL;
}

void wake_thread(struct frd_endpoint *e)
{
    if (e->tcp) tcp_wake(e);
    atomic_fetch_add(&e->naps, 1);
    futex_wake(&e->naps);
    atomic_fetch_add(&e->block->bell.events, 1);
    futex_wake(&e->block->bell.events);
}

/* Makes the progress thread responsible for a message; the lock is held. */
static void leave_to_thread(struct frd_message *m)
{
    struct frd_endpoint *e = m->group->endpoint;
    m->in_background = true;
    e->in_background++;
    if (!e->thread_runs) e->thread_runs = pthread_create(&e->thread, NULL, thread_main, e) == 0;
    else if (e->thread_deep_asleep) wake_thread(e);
}

int frd_tcp_start(struct frd_endpoint *e)
{
    e->thread_runs = pthread_create(&e->thread, NULL, thread_main, e) == 0;
    return e->thread_runs ? FRD_OK : FRD_NO_MEMORY;
}

void progress_stop(struct frd_endpoint *e)
{
    pthread_mutex_lock(&e->lock);
    e->stopping = true;
    pthread_mutex_unlock(&e->lock);
    if (!e->thread_runs) return;
    wake_thread(e);
    pthread_join(e->thread, NULL);
    e->thread_runs = false;
}

/* ---- posting ---- */

static struct frd_message *new_message(struct frd_group *g, bool sends, void *data, size_t bytes, int type, int peer,
                                       int tag)
{
    struct frd_message *m = calloc(1, sizeof *m);
    if (!m) return NULL;
    m->group = g;
    m->sends = sends;
    atomic_store(&m->status, FRD_PENDING);
    m->data = data;
    m->bytes = bytes;
    m->type = type;
    m->peer = m->source = peer;
    m->tag = tag;
    m->inspected = seconds_now();
    if (tag >= 0) g->line->message_call = call_of_message(m);
    return m;
}

static struct frd_message *as_pointer(int status) { return (struct frd_message *)(uintptr_t)status; }

/* `waits`: the caller waits immediately, so the progress thread need not progress the message. */
static struct frd_message *begin_send(struct frd_group *g, const void *data, size_t bytes, int type, int peer, int tag,
                                      bool waits)
{
    if (!is_rank(peer, g->group_ranks) || !element_bytes(type)) return as_pointer(FRD_INVALID);
    struct frd_message *m = new_message(g, true, (void *)data, bytes, type, peer, tag);
    if (!m) return as_pointer(FRD_NO_MEMORY);
    struct frd_endpoint *e = g->endpoint;
    pthread_mutex_lock(&e->lock);
    post_send(m);
    const bool complete = atomic_load(&m->status) == FRD_OK;
    if (!complete && !waits && g->members[peer].local >= 0) leave_to_thread(m);
    pthread_mutex_unlock(&e->lock);
    if (!complete) return m;
    free(m);
    return NULL;
}

static struct frd_message *begin_recv(struct frd_group *g, void *data, size_t bytes, int type, int peer, int tag,
                                      bool waits)
{
    if (peer >= g->group_ranks || !element_bytes(type)) return as_pointer(FRD_INVALID);
    struct frd_message *m = new_message(g, false, data, bytes, type, peer < 0 ? -1 : peer, tag);
    if (!m) return as_pointer(FRD_NO_MEMORY);
    struct frd_endpoint *e = g->endpoint;
    pthread_mutex_lock(&e->lock);
    progress(e);
    post_receive(m);
    const bool pending = atomic_load(&m->status) == FRD_PENDING;
    if (pending && !waits && (peer < 0 || g->members[peer].local >= 0)) leave_to_thread(m);
    pthread_mutex_unlock(&e->lock);
    return m;
}

struct frd_message *frd_post_send(struct frd_group *g, const void *data, size_t bytes, int type, int peer, int tag)
{
    return begin_send(g, data, bytes, type, peer, tag, false);
}

struct frd_message *frd_post_recv(struct frd_group *g, void *data, size_t bytes, int type, int peer, int tag)
{
    return begin_recv(g, data, bytes, type, peer, tag, false);
}

static int wait_at_once(struct frd_group *g, struct frd_message *m, int flags)
{
    if (!m) return FRD_OK;
    return (uintptr_t)m < FRD_LAST_STATUS ? (int)(uintptr_t)m : frd_message_wait(g, m, g->timeout, flags);
}

int frd_send(struct frd_group *g, const void *data, size_t bytes, int type, int peer, int tag, int flags)
{
    return wait_at_once(g, begin_send(g, data, bytes, type, peer, tag, true), flags);
}

int frd_recv(struct frd_group *g, void *data, size_t bytes, int type, int peer, int tag, int flags)
{
    return wait_at_once(g, begin_recv(g, data, bytes, type, peer, tag, true), flags);
}

/* ---- waiting ---- */

static bool is_remote(const struct frd_message *m)
{
    return m->peer >= 0 && m->group->members[m->peer].local < 0;
}

/* Progresses this message and other messages; returns the status of this message. */
static int move_along(struct frd_message *m)
{
    struct frd_endpoint *e = m->group->endpoint;
    pthread_mutex_lock(&e->lock);
    progress(e);
    if (atomic_load(&m->status) == FRD_PENDING && is_remote(m)) {
        struct peer *peer = m->group->members[m->peer].peer;
        if (m->sends) push(peer);
        else pull(peer);
    }
    const int status = atomic_load(&m->status);
    pthread_mutex_unlock(&e->lock);
    return status;
}

/* How a rank ended: FRD_LEFT or FRD_DIED on this host, FRD_CLOSED or FRD_SILENT on another host; else FRD_OK. */
static int end_of(struct frd_group *g, int rank, bool sends)
{
    const struct member *member = &g->members[rank];
    if (member->local < 0) {
        pthread_mutex_lock(&g->endpoint->lock);
        const bool ended = member->gone || member->peer->transport->has_ended(member->peer, sends);
        pthread_mutex_unlock(&g->endpoint->lock);
        if (ended) return FRD_CLOSED;
        return frd_silence(g, rank) > FRD_SILENCE_S ? FRD_SILENT : FRD_OK;
    }
    const struct rank_line *line = &g->local[member->local].block->line;
    if (atomic_load(&line->life.state) == GONE) return FRD_LEFT;
    if (is_alive(member->peer)) return FRD_OK;
    /* the rank may have announced a normal end between the two checks */
    return atomic_load(&line->life.state) == GONE ? FRD_LEFT : FRD_DIED;
}

/* Whether a rank has failed; false if it left normally. */
static bool has_failed(const struct frd_group *g, int rank, int end)
{
    const struct member *member = &g->members[rank];
    return end == FRD_DIED || end == FRD_SILENT || (end == FRD_CLOSED && !member->gone && tcp_has_been_cut(member->peer));
}

/* How a possible peer of a message ended, if one has failed or all have ended; else FRD_OK.  A receive from any rank
 * fails when any rank fails, because the failed rank may have been the sender. */
static int end_of_peers(const struct frd_message *m, int *gone)
{
    struct frd_group *g = m->group;
    int end = FRD_OK;
    bool all = true;
    for (int r = 0; r < g->group_ranks; r++) {
        if (r == g->group_rank || (m->peer >= 0 && r != m->peer)) continue;
        const int its_end = end_of(g, r, m->sends);
        all &= its_end != FRD_OK;
        if (!its_end) continue;
        end = its_end;
        *gone = r;
        if (has_failed(g, r, end)) return end;
    }
    return all ? end : FRD_OK;
}

/* Returns why the message cannot complete, or FRD_OK if it still can; FRD_PENDING at the deadline with FRD_TRY. */
static int inspect(struct frd_message *m, double deadline, int flags)
{
    struct frd_group *g = m->group;
    const struct frd_call call = call_of_message(m);
    m->inspected = seconds_now();
    int gone = 0;
    const int end = end_of_peers(m, &gone);
    /* messages that a rank sent before it ended are valid, so check the rank first and then the streams */
    const int moved = move_along(m);
    if (moved != FRD_PENDING) return moved;
    pthread_mutex_lock(&g->endpoint->lock);
    buffer_unexpected(m);
    pthread_mutex_unlock(&g->endpoint->lock);
    const int status = broken_status(g);
    if (status) return status;
    if (atomic_load(&g->given_up)) return break_group(g, FRD_LEFT, g->group_rank, &call);
    if (end) return break_group(g, end, gone, &call);
    if (flags & FRD_MAIN_THREAD && interrupted()) {
        break_group(g, FRD_INTERRUPTED, g->group_rank, &call);
        return FRD_INTERRUPTED;
    }
    if (m->inspected < deadline) return FRD_OK;
    if (flags & FRD_TRY) return FRD_PENDING;
    return break_group(g, FRD_LATE, m->peer >= 0 ? m->peer : (g->group_rank + 1) % g->group_ranks, &call);
}

/* Publishes the call in which this rank waits.  The stall warning comes later, after other waiting ranks have published
 * their calls, so it can describe a cycle. */
static void show_wait(const struct frd_message *m, double begun, double deadline, double *warn_at)
{
    struct frd_group *g = m->group;
    if (m->tag < 0 || m->inspected < begun + NOTICEABLE_S) return;
    if (!atomic_load(&g->line->waits)) {
        g->line->message_call = call_of_message(m);
        atomic_store(&g->line->waits, 1);
    }
    if (!g->stall_warning || m->inspected < *warn_at) return;
    *warn_at = m->inspected + (m->inspected - begun);
    g->stall_warning(m->inspected - begun, deadline - begun);
}

void frd_message_cancel(struct frd_group *g, struct frd_message *m)
{
    pthread_mutex_lock(&g->endpoint->lock);
    give_up(m);
    pthread_mutex_unlock(&g->endpoint->lock);
}

/* The result for the caller; frees the message unless it is pending. */
static int outcome(struct frd_message *m, int status)
{
    if (status == FRD_PENDING) return status;
    const int source = m->source;
    frd_message_cancel(m->group, m);
    return status | (source < 0 ? 0 : source) << 8;
}

int frd_message_test(struct frd_group *g, struct frd_message *m)
{
    (void)g;
    int status = atomic_load(&m->status);
    if (status == FRD_PENDING) status = move_along(m);
    if (status == FRD_PENDING && seconds_now() >= m->inspected + INSPECTION_S) {
        const int failed = inspect(m, 1e300, 0);
        status = failed ? failed : atomic_load(&m->status);
    }
    return outcome(m, status);
}

int frd_message_wait(struct frd_group *g, struct frd_message *m, double timeout, int flags)
{
    struct frd_endpoint *e = g->endpoint;
    struct process_block *block = e->block;
    const double begun = seconds_now(), deadline = begun + timeout;
    double warn_at = begun + STALL_WARNING_S;
    int status = atomic_load(&m->status);
    m->inspected = begun;
    atomic_fetch_add(&block->bell.attended, 1);
    uint32_t seen = atomic_load(&block->bell.events) - 1; /* check at least once */
    for (int turn = 0; status == FRD_PENDING; turn++) {
        const uint32_t events = atomic_load(&block->bell.events);
        bool slept = false;
        if (events != seen || (is_remote(m) && turn % 16 == 0)) {
            seen = events;
            status = move_along(m);
        } else if (turn < SPINS && !(flags & FRD_BACKGROUND) && atomic_load_explicit(&e->crowded, memory_order_relaxed) <= 0) {
            relax();
            status = atomic_load(&m->status);
        } else if (turn < SPINS + YIELDS) {
            if (turn < SPINS) turn = SPINS;
            if (yield_core()) atomic_store_explicit(&e->crowded, CROWDED_WAITS, memory_order_relaxed);
            status = atomic_load(&m->status);
        } else {
            atomic_fetch_add(&block->bell.sleepers, 1);
            if (atomic_load(&block->bell.events) == seen) futex_wait(&block->bell.events, seen, SLICE_S);
            atomic_fetch_sub(&block->bell.sleepers, 1);
            status = atomic_load(&m->status);
            slept = true;
        }
        if (status != FRD_PENDING || (!slept && turn % 1024 != 1023)) continue;
        if (seconds_now() < m->inspected + INSPECTION_S) continue;
        const int failed = inspect(m, deadline, flags);
        status = failed ? failed : atomic_load(&m->status);
        if (failed) break;
        if (status == FRD_PENDING) show_wait(m, begun, deadline, &warn_at);
    }
    if (m->tag >= 0 && atomic_load_explicit(&g->line->waits, memory_order_relaxed)) atomic_store(&g->line->waits, 0);
    const int crowded = atomic_load_explicit(&e->crowded, memory_order_relaxed);
    if (crowded > 0) atomic_store_explicit(&e->crowded, crowded - 1, memory_order_relaxed);
    atomic_fetch_sub(&block->bell.attended, 1);
    /* an event during this wait has not woken the progress thread */
    if (atomic_load(&block->bell.events) != seen && e->in_background) {
        pthread_mutex_lock(&e->lock);
        progress(e);
        pthread_mutex_unlock(&e->lock);
    }
    return outcome(m, status);
}
