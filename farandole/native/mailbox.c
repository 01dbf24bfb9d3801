/* Which message goes into which receive.
 *
 * A receive takes the first message of its sender (or of any) that carries its tag.  A message that finds
 * no receive waits in its stream, unless some other receive wants what is behind it: then it is put aside.
 */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

#define TURN_BYTES ((size_t)4 << 20) /* after so many bytes of one stream the others have their turn */

struct frd_call call_of_message(const struct frd_group *g, const struct frd_message *m)
{
    if (m->tag < 0) return g->current; /* a part of a collective */
    return (struct frd_call){.index = g->calls, .operation = m->sends ? FRD_SEND : FRD_RECV,
                             .type = (uint32_t)m->type, .root = m->peer,
                             .count = m->bytes / element_bytes(m->type), .layout = (uint64_t)m->tag};
}

void finish(struct frd_group *g, struct frd_message *m, int status)
{
    m->status = status;
    if (m->in_background) g->mail.in_background--;
    m->in_background = false;
    ring_doorbell(g, g->rank); /* another thread of this process may wait for it */
}

void unlink_message(struct frd_message **list, struct frd_message *m)
{
    while (*list && *list != m) list = &(*list)->next;
    if (*list) *list = m->next;
}

void append_message(struct frd_message **list, struct frd_message *m)
{
    while (*list) list = &(*list)->next;
    *list = m;
}

/* After bytes of a stream have moved. */
static void announce(struct frd_group *g, const struct peer *peer, size_t bytes)
{
    if (bytes && peer->local >= 0) ring_doorbell(g, peer->local);
    if (bytes >= TURN_BYTES) wires_remind(g, peer);
}

/* ---- sending ---- */

static size_t put(struct frd_group *g, struct peer *peer, const char *data, size_t bytes, bool more)
{
    if (!bytes) return 0;
    return peer->outward ? ring_put(peer->outward, data, bytes) : wire_put(g, peer, data, bytes, more);
}

bool push(struct frd_group *g, struct peer *peer)
{
    size_t total = 0;
    for (struct frd_message *m = peer->sends; m && !peer->sends_torn && total < TURN_BYTES; m = peer->sends) {
        const char *envelope = (const char *)&m->envelope;
        const size_t opened =
            put(g, peer, envelope + m->envelope_moved, ENVELOPE - m->envelope_moved, m->bytes > 0);
        m->envelope_moved += opened;
        m->started |= opened > 0;
        size_t moved = 0;
        if (m->envelope_moved == ENVELOPE)
            moved = put(g, peer, m->data + m->moved, smaller(m->bytes - m->moved, TURN_BYTES), false);
        m->moved += moved;
        total += opened + moved;
        if (m->envelope_moved < ENVELOPE || m->moved < m->bytes) {
            if (opened + moved) continue; /* a ring or a socket may take more at once */
            break;
        }
        peer->sends = m->next;
        finish(g, m, FRD_OK);
    }
    announce(g, peer, total);
    return total > 0;
}

/* ---- receiving ---- */

bool could_take(const struct frd_message *m, int source) { return m->peer < 0 || m->peer == source; }

static struct frd_message *find_receive(struct frd_group *g, int source, int tag, bool *wanted)
{
    *wanted = false;
    for (struct frd_message *m = g->mail.receives; m; m = m->next) {
        if (m->started || !could_take(m, source)) continue;
        *wanted = true;
        if (m->tag == tag) return m;
    }
    return NULL;
}

static void refuse(struct frd_group *g, struct frd_message *m, int source, const struct envelope *e)
{
    const struct frd_call theirs = {.index = g->calls, .operation = FRD_SEND, .type = e->type, .root = g->mail.rank,
                                    .count = e->bytes / element_bytes((int)e->type), .layout = (uint64_t)e->tag};
    struct frd_call own = call_of_message(g, m);
    int status = FRD_MISMATCH;
    own.root = source;
    if (m->tag < 0) { /* a part of a collective: as where shared memory finds uneven counts */
        status = FRD_MISFIT;
        own.count = theirs.count;
        own.layout = m->bytes / element_bytes(m->type);
        own.root = g->mail.rank;
    }
    unlink_message(&g->mail.receives, m);
    finish(g, m, break_between(g, status, source, m->tag < 0 ? &g->current : &theirs, &own));
}

static bool fits(const struct frd_message *m, const struct envelope *e)
{
    return m->bytes == e->bytes && m->type == (int)e->type;
}

/* Decides where the payload of the next message goes; false: it stays in its stream for now. */
static bool open_message(struct frd_group *g, struct peer *from)
{
    struct inbox *inbox = &from->inbox;
    const struct envelope *envelope = &inbox->envelope;
    bool wanted;
    struct frd_message *m = find_receive(g, from->rank, envelope->tag, &wanted);
    if (!m && !wanted) return false;
    if (m && !fits(m, envelope)) {
        refuse(g, m, from->rank, envelope);
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
        m->source = from->rank;
    }
    inbox->under_way = true;
    inbox->moved = 0;
    inbox->receive = m;
    inbox->stray = stray;
    return true;
}

static void hand_over(struct frd_group *g, struct peer *from, struct stray *stray, struct frd_message *m)
{
    memcpy(m->data, stray->data, m->bytes);
    struct stray **list = &from->inbox.strays;
    while (*list != stray) list = &(*list)->next;
    *list = stray->next;
    free(stray);
    m->moved = m->bytes;
    unlink_message(&g->mail.receives, m);
    finish(g, m, FRD_OK);
}

static void close_message(struct frd_group *g, struct peer *from)
{
    struct inbox *inbox = &from->inbox;
    inbox->under_way = false;
    inbox->envelope_moved = 0;
    if (inbox->receive) {
        unlink_message(&g->mail.receives, inbox->receive);
        finish(g, inbox->receive, FRD_OK);
        return;
    }
    inbox->stray->complete = true;
    if (inbox->stray->claimed_by) hand_over(g, from, inbox->stray, inbox->stray->claimed_by);
}

static size_t take(struct frd_group *g, struct peer *peer, char *data, size_t bytes)
{
    if (!bytes) return 0;
    return peer->inward ? ring_take(peer->inward, data, bytes) : wire_take(g, peer, data, bytes);
}

bool pull(struct frd_group *g, struct peer *from)
{
    struct inbox *inbox = &from->inbox;
    size_t total = 0;
    while (!inbox->torn && total < TURN_BYTES) {
        size_t moved = 0;
        if (!inbox->under_way) {
            const size_t missing = ENVELOPE - inbox->envelope_moved;
            moved = take(g, from, (char *)&inbox->envelope + inbox->envelope_moved, missing);
            inbox->envelope_moved += moved;
            total += moved;
            if (moved < missing || !open_message(g, from)) break;
        }
        char *target = inbox->receive ? inbox->receive->data : inbox->stray->data;
        const size_t left = inbox->envelope.bytes - inbox->moved;
        const size_t payload = take(g, from, target + inbox->moved, smaller(left, TURN_BYTES));
        inbox->moved += payload;
        total += payload;
        if (payload == left) close_message(g, from);
        else if (!payload) break;
    }
    announce(g, from, total);
    return total > 0;
}

/* A message put aside earlier is older than any in the stream, so it goes first. */
void claim_stray(struct frd_group *g, struct frd_message *m)
{
    for (int source = 0; source < g->mail.ranks && !m->started; source++) {
        struct peer *from = &g->mail.peers[source];
        if (!could_take(m, source)) continue;
        for (struct stray *stray = from->inbox.strays; stray; stray = stray->next) {
            if (stray->claimed_by || stray->envelope.tag != m->tag) continue;
            if (!fits(m, &stray->envelope)) {
                refuse(g, m, source, &stray->envelope);
                return;
            }
            m->started = true;
            m->source = source;
            stray->claimed_by = m;
            if (stray->complete) hand_over(g, from, stray, m);
            break;
        }
    }
}
