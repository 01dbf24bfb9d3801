/* Point-to-point messages between the ranks of a host.
 *
 * Every ordered pair of ranks has a ring of bytes in the shared segment: one writer, one reader, two
 * counters that only grow (`written` and `taken`).  A message is a 64-byte envelope and its payload, padded
 * to 64 bytes.  The writer fills what is free and then publishes `written`; the reader empties what is
 * there and then publishes `taken`: so each sees only bytes that the other has finished with.
 *
 * A receive takes the first message of its sender (or of any) that carries its tag.  A message that finds
 * no receive waits in the ring, unless some other receive wants what is behind it: then it is put aside.
 *
 * Whoever waits moves everybody's data along, and a thread of the core does so while nobody waits.  What a
 * rank does to another's rings it announces by that rank's doorbell, on which idle waiters sleep.
 */
#define _GNU_SOURCE
#include "messages.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "internal.h"

#define ENVELOPE 64
#define SPINS 200
#define YIELDS 40
#define SLICE_S 0.010
#define INSPECTION_S 0.050
#define NEVER_S 1e300

struct envelope {
    uint64_t bytes;
    int32_t tag;
    uint32_t type;
    char padding[ENVELOPE - 16];
};

struct frd_message {
    struct frd_message *next;
    bool sends, started, in_background;
    int peer, tag, type, source, status;
    char *data;
    size_t bytes, moved;
    double inspected; /* when somebody last looked whether its other end lives */
};

/* A message that arrived before its receive. */
struct stray {
    struct stray *next;
    struct frd_message *claimed_by;
    struct envelope envelope;
    bool complete;
    char data[];
};

/* What comes from one rank: the message under way, and those put aside (oldest first).  A message that was
 * given up half-way leaves its ring useless: nobody could tell its rest from the next one.  Its group is
 * broken, and the end that gave up (`torn`, `sends_torn`) moves nothing there any more. */
struct inbox {
    bool torn;
    bool under_way;
    struct envelope envelope;
    size_t moved;
    struct frd_message *receive; /* where it goes; if NULL, into the stray */
    struct stray *stray, *strays;
};

static size_t padded(size_t bytes) { return (bytes + ENVELOPE - 1) / ENVELOPE * ENVELOPE; }
static struct ring *ring_between(struct frd_group *g, int from, int to) { return &g->rings[from * g->ranks + to]; }

static void ring_doorbell(struct frd_group *g, int rank)
{
    struct rank_line *line = &g->lines[rank];
    atomic_fetch_add(&line->doorbell.rings, 1);
    wake_if_asleep(&line->doorbell.rings, &line->doorbell.sleepers);
}

static void finish(struct frd_group *g, struct frd_message *m, int status)
{
    m->status = status;
    if (m->in_background) g->in_background--;
    m->in_background = false;
    ring_doorbell(g, g->rank); /* another thread of this process may wait for it */
}

static void unlink_message(struct frd_message **list, struct frd_message *m)
{
    while (*list && *list != m) list = &(*list)->next;
    if (*list) *list = m->next;
}

static void append_message(struct frd_message **list, struct frd_message *m)
{
    while (*list) list = &(*list)->next;
    *list = m;
}

/* ---- sending ---- */

static bool push(struct frd_group *g, int peer)
{
    struct frd_message *m = g->sends[peer];
    struct ring *ring = ring_between(g, g->rank, peer);
    bool moved = false;
    while (m && !g->sends_torn[peer]) {
        uint64_t written = atomic_load_explicit(&ring->written.bytes, memory_order_relaxed);
        size_t space = RING_BYTES - (size_t)(written - atomic_load_explicit(&ring->taken.bytes, memory_order_acquire));
        if (space < ENVELOPE) break;
        if (!m->started) {
            const struct envelope envelope = {.bytes = m->bytes, .tag = m->tag, .type = (uint32_t)m->type};
            memcpy(ring->data + written % RING_BYTES, &envelope, ENVELOPE);
            written += ENVELOPE;
            space -= ENVELOPE;
            m->started = true;
        }
        while (space && m->moved < m->bytes) {
            const size_t at = written % RING_BYTES;
            const size_t bytes = smaller(smaller(space, RING_BYTES - at), m->bytes - m->moved);
            memcpy(ring->data + at, m->data + m->moved, bytes);
            m->moved += bytes;
            written += padded(bytes); /* only the last piece of a message is not a multiple already */
            space -= padded(bytes);
        }
        atomic_store_explicit(&ring->written.bytes, written, memory_order_release);
        ring_doorbell(g, peer);
        moved = true;
        if (m->moved < m->bytes) break;
        g->sends[peer] = m->next;
        finish(g, m, FRD_OK);
        m = g->sends[peer];
    }
    return moved;
}

/* ---- receiving ---- */

static bool could_take(const struct frd_message *m, int source) { return m->peer < 0 || m->peer == source; }

static struct frd_message *find_receive(struct frd_group *g, int source, int tag, bool *wanted)
{
    *wanted = false;
    for (struct frd_message *m = g->receives; m; m = m->next) {
        if (m->started || !could_take(m, source)) continue;
        *wanted = true;
        if (m->tag == tag) return m;
    }
    return NULL;
}

static void refuse(struct frd_group *g, struct frd_message *m, int source, const struct envelope *e)
{
    const struct frd_call theirs = {.index = g->calls, .operation = FRD_SEND, .type = e->type, .root = g->rank,
                                    .count = e->bytes / element_bytes((int)e->type), .layout = (uint64_t)e->tag};
    const struct frd_call own = {.index = g->calls, .operation = FRD_RECV, .type = (uint32_t)m->type, .root = source,
                                 .count = m->bytes / element_bytes(m->type), .layout = (uint64_t)m->tag};
    unlink_message(&g->receives, m);
    finish(g, m, break_between(g, FRD_MISMATCH, source, &theirs, &own));
}

static bool fits(const struct frd_message *m, const struct envelope *e)
{
    return m->bytes == e->bytes && m->type == (int)e->type;
}

/* Reads the next envelope of a ring and decides where its payload goes; false: it stays there for now. */
static bool open_message(struct frd_group *g, int source, const struct envelope *envelope)
{
    struct inbox *inbox = &g->inboxes[source];
    bool wanted;
    struct frd_message *m = find_receive(g, source, envelope->tag, &wanted);
    if (!m && !wanted) return false;
    if (m && !fits(m, envelope)) {
        refuse(g, m, source, envelope);
        return false;
    }
    struct stray *stray = NULL;
    if (!m) {
        stray = calloc(1, sizeof *stray + envelope->bytes);
        if (!stray) return false; /* no memory to put it aside: leave it there until its receive comes */
        stray->envelope = *envelope;
        struct stray **end = &inbox->strays;
        while (*end) end = &(*end)->next;
        *end = stray;
    } else {
        m->started = true;
        m->source = source;
    }
    inbox->under_way = true;
    inbox->envelope = *envelope;
    inbox->moved = 0;
    inbox->receive = m;
    inbox->stray = stray;
    return true;
}

static void hand_over(struct frd_group *g, int source, struct stray *stray, struct frd_message *m)
{
    memcpy(m->data, stray->data, m->bytes);
    struct stray **list = &g->inboxes[source].strays;
    while (*list != stray) list = &(*list)->next;
    *list = stray->next;
    free(stray);
    m->moved = m->bytes;
    unlink_message(&g->receives, m);
    finish(g, m, FRD_OK);
}

static void close_message(struct frd_group *g, int source)
{
    struct inbox *inbox = &g->inboxes[source];
    inbox->under_way = false;
    if (inbox->receive) {
        unlink_message(&g->receives, inbox->receive);
        finish(g, inbox->receive, FRD_OK);
        return;
    }
    inbox->stray->complete = true;
    if (inbox->stray->claimed_by) hand_over(g, source, inbox->stray, inbox->stray->claimed_by);
}

static bool pull(struct frd_group *g, int source)
{
    struct inbox *inbox = &g->inboxes[source];
    struct ring *ring = ring_between(g, source, g->rank);
    bool moved = false;
    while (!inbox->torn) {
        uint64_t taken = atomic_load_explicit(&ring->taken.bytes, memory_order_relaxed);
        size_t there = (size_t)(atomic_load_explicit(&ring->written.bytes, memory_order_acquire) - taken);
        if (!there) break;
        if (!inbox->under_way) {
            struct envelope envelope;
            memcpy(&envelope, ring->data + taken % RING_BYTES, ENVELOPE);
            if (!open_message(g, source, &envelope)) break;
            taken += ENVELOPE;
            there -= ENVELOPE;
        }
        char *target = inbox->receive ? inbox->receive->data : inbox->stray->data;
        while (there && inbox->moved < inbox->envelope.bytes) {
            const size_t at = taken % RING_BYTES;
            const size_t left = inbox->envelope.bytes - inbox->moved;
            const size_t bytes = smaller(smaller(there, RING_BYTES - at), left);
            memcpy(target + inbox->moved, ring->data + at, bytes);
            inbox->moved += bytes;
            taken += padded(bytes);
            there -= padded(bytes);
        }
        atomic_store_explicit(&ring->taken.bytes, taken, memory_order_release);
        ring_doorbell(g, source);
        moved = true;
        if (inbox->moved == inbox->envelope.bytes) close_message(g, source);
    }
    return moved;
}

/* Moves all that can be moved; the lock is held. */
static bool progress(struct frd_group *g)
{
    bool moved = false;
    for (int r = 0; r < g->ranks; r++) {
        if (g->sends[r]) moved |= push(g, r);
        if (g->receives || g->inboxes[r].under_way) moved |= pull(g, r);
    }
    return moved;
}

/* ---- the thread that moves data while nobody waits ---- */

static void *progress_main(void *group)
{
    struct frd_group *g = group;
    struct rank_line *line = &g->lines[g->rank];
    pthread_mutex_lock(&g->lock);
    while (!g->stopping) {
        if (!g->in_background) {
            pthread_cond_wait(&g->work, &g->lock);
            continue;
        }
        const uint32_t heard = atomic_load(&line->doorbell.rings);
        const bool moved = progress(g);
        pthread_mutex_unlock(&g->lock);
        if (!moved) sleep_while(&line->doorbell.rings, heard, &line->doorbell.sleepers, SLICE_S);
        pthread_mutex_lock(&g->lock);
    }
    pthread_mutex_unlock(&g->lock);
    return NULL;
}

static void see_to_in_background(struct frd_group *g, struct frd_message *m)
{
    m->in_background = true;
    g->in_background++;
    if (!g->progress_running) g->progress_running = pthread_create(&g->progress_thread, NULL, progress_main, g) == 0;
    pthread_cond_signal(&g->work);
}

int messages_start(struct frd_group *g, int ranks)
{
    g->inboxes = calloc((size_t)ranks, sizeof *g->inboxes);
    if (!g->inboxes) return -1;
    pthread_mutex_init(&g->lock, NULL);
    pthread_cond_init(&g->work, NULL);
    return 0;
}

void messages_stop(struct frd_group *g)
{
    pthread_mutex_lock(&g->lock);
    g->stopping = true;
    pthread_cond_signal(&g->work);
    pthread_mutex_unlock(&g->lock);
    if (g->progress_running) pthread_join(g->progress_thread, NULL);
    for (int r = 0; r < g->ranks; r++) {
        for (struct stray *stray = g->inboxes[r].strays, *next; stray; stray = next) {
            next = stray->next;
            free(stray);
        }
    }
    free(g->inboxes);
    pthread_cond_destroy(&g->work);
    pthread_mutex_destroy(&g->lock);
}

/* ---- what the caller sees ---- */

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
    m->inspected = seconds_now();
    g->lines[g->rank].message_call = (struct frd_call){
        .index = g->calls, .operation = sends ? FRD_SEND : FRD_RECV, .type = (uint32_t)type, .root = peer,
        .count = bytes / element_bytes(type), .layout = (uint64_t)tag};
    return m;
}

struct frd_message *frd_post_send(struct frd_group *g, const void *data, size_t bytes, int type, int peer, int tag,
                                  int in_background)
{
    pthread_mutex_lock(&g->lock);
    struct frd_message *m = new_message(g, true, (void *)data, bytes, type, peer, tag);
    if (m) {
        append_message(&g->sends[peer], m);
        push(g, peer);
        if (in_background && m->status == FRD_PENDING) see_to_in_background(g, m);
    }
    pthread_mutex_unlock(&g->lock);
    return m;
}

/* A message put aside earlier is older than any in the ring, so it goes first. */
static void claim_stray(struct frd_group *g, struct frd_message *m)
{
    for (int source = 0; source < g->ranks && !m->started; source++) {
        if (!could_take(m, source)) continue;
        for (struct stray *stray = g->inboxes[source].strays; stray; stray = stray->next) {
            if (stray->claimed_by || stray->envelope.tag != m->tag) continue;
            if (!fits(m, &stray->envelope)) {
                refuse(g, m, source, &stray->envelope);
                return;
            }
            m->started = true;
            m->source = source;
            stray->claimed_by = m;
            if (stray->complete) hand_over(g, source, stray, m);
            break;
        }
    }
}

struct frd_message *frd_post_recv(struct frd_group *g, void *data, size_t bytes, int type, int peer, int tag,
                                  int in_background)
{
    pthread_mutex_lock(&g->lock);
    struct frd_message *m = new_message(g, false, data, bytes, type, peer, tag);
    if (m) {
        append_message(&g->receives, m);
        claim_stray(g, m);
        for (int r = 0; r < g->ranks; r++)
            if (m->status == FRD_PENDING && could_take(m, r)) pull(g, r);
        if (in_background && m->status == FRD_PENDING) see_to_in_background(g, m);
    }
    pthread_mutex_unlock(&g->lock);
    return m;
}

static int move_along(struct frd_group *g, struct frd_message *m)
{
    pthread_mutex_lock(&g->lock);
    if (m->status == FRD_PENDING) progress(g);
    const int status = m->status;
    pthread_mutex_unlock(&g->lock);
    return status;
}

/* Who ended so that this message cannot be completed any more, if all who could have ended; -1 if none. */
static int gone_peer(struct frd_group *g, const struct frd_message *m)
{
    int gone = -1;
    for (int r = 0; r < g->ranks; r++) {
        if (r == g->rank || (m->peer >= 0 && r != m->peer)) continue;
        const bool left = atomic_load(&g->lines[r].life.state) == GONE;
        if (!left && !has_ended(g, r)) return -1; /* somebody can still answer */
        gone = r;
    }
    return gone;
}

/* Has something happened after which the message will never be complete?  FRD_OK if not. */
static int inspect(struct frd_group *g, struct frd_message *m, double deadline, int flags)
{
    const struct frd_call call = {.index = g->calls, .operation = m->sends ? FRD_SEND : FRD_RECV, .root = m->peer,
                                  .type = (uint32_t)m->type, .count = m->bytes / element_bytes(m->type),
                                  .layout = (uint64_t)m->tag};
    m->inspected = seconds_now();
    const int gone = gone_peer(g, m);
    /* what a rank sent before it ended still counts, so look at the rings after its end was seen */
    const int moved = move_along(g, m);
    if (moved != FRD_PENDING) return moved;
    const int status = broken_status(g);
    if (status) return status;
    if (atomic_load(&g->given_up)) return break_group(g, FRD_LEFT, g->rank, &call);
    if (gone >= 0) {
        const bool left = atomic_load(&g->lines[gone].life.state) == GONE;
        return break_group(g, left ? FRD_LEFT : FRD_DIED, gone, &call);
    }
    if (flags & FRD_MAIN_THREAD && interrupted()) {
        break_group(g, FRD_INTERRUPTED, g->rank, &call);
        return FRD_INTERRUPTED;
    }
    if (m->inspected < deadline) return FRD_OK;
    if (flags & FRD_TRY) return FRD_PENDING;
    return break_group(g, FRD_LATE, m->peer >= 0 ? m->peer : (g->rank + 1) % g->ranks, &call);
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
    pthread_mutex_lock(&g->lock);
    if (m->status == FRD_PENDING) { /* given up */
        if (m->started) break_group(g, FRD_INTERRUPTED, g->rank, &g->lines[g->rank].message_call);
        if (m->started && m->sends) g->sends_torn[m->peer] = true;
        for (int r = 0; r < g->ranks; r++) {
            if (g->inboxes[r].under_way && g->inboxes[r].receive == m) g->inboxes[r].torn = true;
            for (struct stray *s = g->inboxes[r].strays; s; s = s->next)
                if (s->claimed_by == m) s->claimed_by = NULL;
        }
        unlink_message(m->sends ? &g->sends[m->peer] : &g->receives, m);
        finish(g, m, FRD_INTERRUPTED);
    }
    pthread_mutex_unlock(&g->lock);
    free(m);
}
