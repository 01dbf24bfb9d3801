/* Matching of messages and receives.
 *
 * A receive matches the first message of its group with its tag, from its source or from any source.  A message that
 * matches no posted receive is unexpected.  Unexpected messages are buffered, up to UNEXPECTED_BYTES per sender.
 * Beyond this limit a message stays in its stream, unless a posted receive may match a message behind it.
 */
#include <stdlib.h>
#include <string.h>

#include "messages.h"

struct frd_call call_of_message(const struct frd_message *m)
{
    const struct frd_group *g = m->group;
    if (m->tag < 0) return g->current; /* part of a collective */
    return (struct frd_call){.index = g->calls, .operation = m->sends ? FRD_SEND : FRD_RECV,
                             .type = (uint32_t)m->type, .root = m->peer,
                             .count = m->bytes / element_bytes(m->type), .layout = (uint64_t)m->tag};
}

static struct frd_group *find_group(struct frd_endpoint *e, uint64_t context)
{
    struct frd_group *g = e->groups[context % CONTEXTS];
    while (g && g->context != context) g = g->next;
    return g;
}

/* ---- queues: messages and unexpected messages begin with `next` ---- */

struct linked {
    struct linked *next;
};

static void append(struct queue *queue, void *item)
{
    struct linked *last = queue->last;
    ((struct linked *)item)->next = NULL;
    if (last) last->next = item;
    else queue->first = item;
    queue->last = item;
}

static void take_out(struct queue *queue, void *item)
{
    struct linked *before = NULL;
    for (struct linked *x = queue->first; x; before = x, x = x->next) {
        if (x != item) continue;
        if (before) before->next = x->next;
        else queue->first = x->next;
        if (queue->last == item) queue->last = before;
        return;
    }
}

void enqueue(struct queue *queue, struct frd_message *m) { append(queue, m); }
void dequeue(struct queue *queue, struct frd_message *m) { take_out(queue, m); }

void finish(struct frd_message *m, int status)
{
    if (m->detached) { /* its group may have been closed */
        free(m->data);
        free(m);
        return;
    }
    struct frd_endpoint *e = m->group->endpoint;
    if (m->in_background) e->in_background--;
    m->in_background = false;
    atomic_store(&m->status, status);
    ring_own_bell(e); /* another thread of this process may wait for the message */
}

/* ---- sending ---- */

bool push(struct peer *peer)
{
    const struct transport *way = peer->transport;
    size_t total = 0;
    for (struct frd_message *m = peer->sends.first; m && total < TURN_BYTES; m = peer->sends.first) {
        const bool streamed = m->header.kind != OFFER && m->bytes;
        const char *header = (const char *)&m->header;
        const size_t opened = m->header_moved == HEADER
            ? 0 : way->put(peer, header + m->header_moved, HEADER - m->header_moved, streamed);
        m->header_moved += opened;
        m->started |= opened > 0;
        size_t moved = 0;
        if (m->header_moved == HEADER && streamed && m->moved < m->bytes)
            moved = way->put(peer, m->data + m->moved, smaller(m->bytes - m->moved, TURN_BYTES), false);
        m->moved += moved;
        total += opened + moved;
        if (m->header_moved < HEADER || (streamed && m->moved < m->bytes)) {
            if (opened + moved) continue; /* the ring or socket may accept more data */
            break;
        }
        dequeue(&peer->sends, m);
        /* if the receiver gave up meanwhile, it has broken the group */
        if (m->header.kind == OFFER) enqueue(&peer->offered, m);
        else finish(m, m->header.kind == PAYLOAD && !m->detached ? broken_status(m->group) : FRD_OK);
    }
    if (total) way->moved_out(peer);
    if (total >= TURN_BYTES) way->again(peer);
    return total > 0;
}

void post_send(struct frd_message *m)
{
    struct frd_group *g = m->group;
    struct peer *peer = g->members[m->peer].peer;
    m->header = (struct header){.bytes = m->bytes, .context = g->context, .kind = EAGER, .tag = m->tag,
                                .type = (uint32_t)m->type, .source = g->group_rank};
    if (peer->transport->offers && m->bytes > EAGER_BYTES) {
        m->header.kind = OFFER;
        m->header.number = ++g->endpoint->offers;
        m->header.place = is_shared(m->data, m->bytes) ? 1 + arena_offset(m->data) : 0;
    }
    enqueue(&peer->sends, m);
    push(peer);
}

/* The message is detached: it is freed when it has been sent. */
void send_control(struct peer *peer, struct header header)
{
    struct frd_message *m = calloc(1, sizeof *m);
    if (!m) return; /* out of memory: the peer detects this when this process ends */
    m->sends = m->detached = true;
    m->status = FRD_PENDING;
    m->header = header;
    enqueue(&peer->sends, m);
    push(peer);
}

/* Handles the receiver's reply to an offer: CLEAR requests the payload, DONE says that the receiver has copied it.  The
 * send may have been cancelled meanwhile. */
static void answer_offer(struct peer *peer, const struct header *h)
{
    struct frd_message *m = peer->offered.first;
    while (m && m->header.number != h->number) m = m->next;
    if (!m) return;
    dequeue(&peer->offered, m);
    if (h->kind == DONE) {
        finish(m, FRD_OK);
        return;
    }
    m->header.kind = PAYLOAD;
    m->header_moved = 0;
    enqueue(&peer->sends, m);
    push(peer);
}

/* ---- receiving ---- */

static bool fits(const struct frd_message *m, const struct header *h)
{
    return m->bytes == h->bytes && m->type == (int)h->type;
}

static struct frd_message *first_with_tag(const struct queue *queue, int tag)
{
    struct frd_message *m = queue->first;
    while (m && m->tag != tag) m = m->next;
    return m;
}

/* Removes and returns the earliest posted receive that matches a message, that is, receives from its source or from
 * any source. */
static struct frd_message *match(struct frd_group *g, int source, int tag)
{
    struct queue *named = &g->members[source].posted;
    struct frd_message *m = first_with_tag(named, tag), *any = first_with_tag(&g->posted_any, tag);
    const bool takes_any = any && (!m || any->number < m->number);
    if (takes_any) m = any;
    if (m) dequeue(takes_any ? &g->posted_any : named, m);
    return m;
}

static void refuse(struct frd_message *m, int source, const struct header *h)
{
    struct frd_group *g = m->group;
    const struct frd_call theirs = {.index = g->calls, .operation = FRD_SEND, .type = h->type, .root = g->group_rank,
                                    .count = h->bytes / element_bytes((int)h->type), .layout = (uint64_t)h->tag};
    struct frd_call own = call_of_message(m);
    int status = FRD_MISMATCH;
    own.root = source;
    if (m->tag < 0) { /* part of a collective: report the counts, as for a mismatch in shared memory */
        status = FRD_PART_COUNT_MISMATCH;
        own.count = theirs.count;
        own.layout = m->bytes / element_bytes(m->type);
        own.root = g->group_rank;
    }
    finish(m, break_between(g, status, source, m->tag < 0 ? &g->current : &theirs, &own));
}

/* Whether a posted receive of any group may match a message of this peer. */
static bool is_wanted(const struct peer *from)
{
    const struct frd_endpoint *e = from->endpoint;
    for (int c = 0; c < CONTEXTS; c++) {
        for (const struct frd_group *g = e->groups[c]; g; g = g->next) {
            if (g->posted_any.first) return true;
            for (int r = 0; r < g->group_ranks; r++)
                if (g->members[r].peer == from && g->members[r].posted.first) return true;
        }
    }
    return false;
}

/* Requests an offered payload. */
static void clear_offer(struct peer *from, const struct header *h)
{
    send_control(from, (struct header){.kind = CLEAR, .number = h->number, .context = h->context});
}

/* Starts a receive whose header has arrived: the payload follows in the stream or was offered. */
static void start(struct frd_message *m, struct peer *from, const struct header *h)
{
    struct frd_group *g = m->group;
    m->started = true;
    m->source = h->source;
    m->from = from;
    if (h->kind != OFFER) return;
    if (h->place) {
        memcpy(m->data, from->arena + h->place - 1, m->bytes);
        m->moved = m->bytes;
        send_control(from, (struct header){.kind = DONE, .number = h->number, .context = h->context});
        /* a sender that cancels breaks the group before it changes the payload: an unbroken group means intact data */
        finish(m, broken_status(g));
    } else {
        m->header = *h;
        enqueue(&g->members[m->source].cleared, m);
        clear_offer(from, h);
    }
}

static struct unexpected *buffer(struct queue *queue, struct peer *from, const struct header *h)
{
    const size_t payload = h->kind == EAGER ? h->bytes : 0;
    struct unexpected *u = malloc(sizeof *u + payload);
    if (!u) return NULL;
    *u = (struct unexpected){.header = *h, .from = from, .complete = payload == 0};
    append(queue, u);
    from->in.buffered += payload;
    return u;
}

static void control(struct frd_group *g, const struct header *h)
{
    if (h->kind == GROUP_LEFT) g->members[h->source].gone = true;
    else break_group(g, FRD_ELSEWHERE, h->source, &g->current);
    ring_own_bell(g->endpoint);
}

/* Frees an unexpected message and discards the rest of a payload that is arriving. */
static void drop(struct unexpected *u)
{
    struct incoming *in = &u->from->in;
    if (u->header.kind != OFFER) in->buffered -= u->header.bytes;
    if (in->unexpected == u) in->unexpected = NULL;
    free(u);
}

/* Whether a process may send this header to a group: only a failure may name a rank other than the sender. */
static bool is_sender(const struct frd_group *g, const struct header *h, const struct peer *from)
{
    return is_rank(h->source, g->group_ranks) && (h->kind == GROUP_BROKEN || g->members[h->source].peer == from);
}

static bool was_closed(const struct frd_endpoint *e, uint64_t context)
{
    for (int i = 0; i < e->closed_count; i++)
        if (e->closed[i] == context) return true;
    return false;
}

/* Finds the destination of a payload that this process has requested; none if the receive was cancelled. */
static void open_payload(struct frd_group *g, struct peer *from)
{
    struct incoming *in = &from->in;
    if (!g || !is_rank(in->header.source, g->group_ranks)) return;
    struct member *member = &g->members[in->header.source];
    struct frd_message *m = member->cleared.first;
    while (m && !(m->header.number == in->header.number && m->bytes == in->header.bytes)) m = m->next;
    if (m) dequeue(&member->cleared, m);
    in->receive = m;
    struct unexpected *u = m ? NULL : member->unexpected.first;
    while (u && !(u->header.kind == PAYLOAD && u->header.number == in->header.number &&
                  u->header.bytes == in->header.bytes))
        u = u->next;
    in->unexpected = u;
}

/* Whether a header is valid.  Every field is checked before use, because a remote process may be faulty or run another
 * program. */
static bool is_valid(const struct peer *from, const struct header *h)
{
    const bool empty = h->kind == CLEAR || h->kind == DONE || h->kind >= GROUP_LEFT;
    if (h->kind > GROUP_BROKEN || h->bytes > LARGEST_MESSAGE || (empty && h->bytes)) return false;
    if (!empty && (!element_bytes((int)h->type) || h->type >> 24)) return false;
    if (h->kind >= OFFER && h->kind <= DONE && !from->transport->offers) return false;
    return h->kind != OFFER || !h->place ||
           (h->place - 1 < from->arena_bytes && h->bytes <= from->arena_bytes - (h->place - 1));
}

/* Selects the destination of the next message's payload; false: the message stays in its stream. */
static bool open_message(struct peer *from)
{
    struct frd_endpoint *e = from->endpoint;
    struct incoming *in = &from->in;
    const struct header *h = &in->header;
    struct frd_group *g = find_group(e, h->context);
    struct queue *queue = NULL; /* where an unexpected message goes */
    in->receive = NULL;
    in->unexpected = NULL;
    if (!is_valid(from, h)) {
        in->refused = true;
        from->transport->refuse(from);
        return false;
    }
    if (h->kind == CLEAR || h->kind == DONE) {
        answer_offer(from, h);
    } else if (h->kind == PAYLOAD) {
        open_payload(g, from);
    } else if (!g) {
        if (!was_closed(e, h->context)) queue = &e->early;
    } else if (is_sender(g, h, from) && h->kind >= GROUP_LEFT) {
        control(g, h);
    } else if (is_sender(g, h, from)) {
        struct frd_message *m = match(g, h->source, h->tag);
        if (m && !fits(m, h)) {
            refuse(m, h->source, h); /* the group has failed; discard the payload */
        } else if (m) {
            start(m, from, h);
            in->receive = h->kind == EAGER ? m : NULL;
        } else {
            queue = &g->members[h->source].unexpected;
        }
    }
    if (queue) {
        const bool crowded = h->kind == EAGER && in->buffered + h->bytes > UNEXPECTED_BYTES;
        if (g && crowded && !is_wanted(from)) return false;
        in->unexpected = buffer(queue, from, h);
        if (!in->unexpected) return false; /* out of memory: the message stays in the stream until its receive */
    }
    in->under_way = true;
    in->moved = 0;
    return true;
}

static void hand_over(struct unexpected *u, struct frd_message *m)
{
    struct incoming *in = &m->from->in;
    memcpy(m->data, u->data, m->bytes);
    in->buffered -= u->header.bytes;
    take_out(&m->group->members[m->source].unexpected, u);
    free(u);
    m->moved = m->bytes;
    finish(m, FRD_OK);
}

static void close_message(struct peer *from)
{
    struct incoming *in = &from->in;
    in->under_way = false;
    in->header_moved = 0;
    if (in->receive) {
        finish(in->receive, FRD_OK);
    } else if (in->unexpected) {
        in->unexpected->complete = true;
        if (in->unexpected->claimed_by) hand_over(in->unexpected, in->unexpected->claimed_by);
    }
    in->receive = NULL;
    in->unexpected = NULL;
}

bool pull(struct peer *from)
{
    const struct transport *way = from->transport;
    struct incoming *in = &from->in;
    char nowhere[4096];
    size_t total = 0;
    in->blocked = false;
    while (total < TURN_BYTES && !in->refused) {
        if (!in->under_way) {
            const size_t missing = HEADER - in->header_moved;
            const size_t moved = missing ? way->take(from, (char *)&in->header + in->header_moved, missing) : 0;
            in->header_moved += moved;
            total += moved;
            if (moved < missing) break;
            if (!open_message(from)) {
                in->blocked = !in->refused;
                break;
            }
        }
        const bool streamed = in->header.kind == EAGER || in->header.kind == PAYLOAD;
        const size_t left = (streamed ? in->header.bytes : 0) - in->moved;
        char *target = in->receive ? in->receive->data : in->unexpected ? in->unexpected->data : NULL;
        size_t payload = 0;
        if (left && target) payload = way->take(from, target + in->moved, smaller(left, TURN_BYTES));
        else if (left) payload = way->take(from, nowhere, smaller(left, sizeof nowhere));
        in->moved += payload;
        total += payload;
        if (payload == left) close_message(from);
        else if (!payload) break;
    }
    if (total) way->moved_in(from);
    if (total >= TURN_BYTES) way->again(from);
    return total > 0;
}

/* Matches a receive with a buffered message, if any; buffered messages are older than messages in streams. */
static bool claim_unexpected(struct frd_message *m)
{
    struct frd_group *g = m->group;
    const int first = m->peer < 0 ? 0 : m->peer, last = m->peer < 0 ? g->group_ranks - 1 : m->peer;
    for (int source = first; source <= last; source++) {
        struct member *member = &g->members[source];
        for (struct unexpected *u = member->unexpected.first; u; u = u->next) {
            if (u->claimed_by || u->header.tag != m->tag) continue;
            if (!fits(m, &u->header)) {
                refuse(m, source, &u->header);
                return true;
            }
            if (u->header.kind == OFFER) {
                const struct header h = u->header;
                take_out(&member->unexpected, u);
                free(u);
                start(m, member->peer, &h);
                return true;
            }
            start(m, member->peer, &u->header);
            u->claimed_by = m;
            if (u->complete) hand_over(u, m);
            return true;
        }
    }
    return false;
}

void post_receive(struct frd_message *m)
{
    struct frd_group *g = m->group;
    if (claim_unexpected(m)) return;
    m->number = g->receives_posted++;
    enqueue(m->peer < 0 ? &g->posted_any : &g->members[m->peer].posted, m);
    for (int r = m->peer < 0 ? 0 : m->peer; r < g->group_ranks && (r == m->peer || m->peer < 0); r++)
        if (atomic_load(&m->status) == FRD_PENDING && g->members[r].peer->in.blocked) pull(g->members[r].peer);
}

/* ---- giving up ---- */

/* Detaches a started send and gives it a copy of the remaining payload.  The send must be completed, because the
 * receiver counts its bytes. */
static bool detach(struct frd_message *m)
{
    char *rest = malloc(m->bytes - m->moved);
    if (!rest) return false;
    memcpy(rest, m->data + m->moved, m->bytes - m->moved);
    m->bytes -= m->moved;
    m->moved = 0;
    m->data = rest;
    m->detached = true;
    return true;
}

void give_up(struct frd_message *m)
{
    struct frd_group *g = m->group;
    struct frd_endpoint *e = g->endpoint;
    if (atomic_load(&m->status) == FRD_PENDING) {
        const struct frd_call call = call_of_message(m);
        if (m->started) break_group(g, FRD_INTERRUPTED, g->group_rank, &call);
        if (m->in_background) e->in_background--;
        m->in_background = false;
        if (m->sends) {
            struct peer *peer = g->members[m->peer].peer;
            const bool begun = m->header_moved > 0, offers = m->header.kind == OFFER;
            if (begun && (!offers || m->header_moved < HEADER) && detach(m)) return; /* freed after it is sent */
            dequeue(offers && m->header_moved == HEADER ? &peer->offered : &peer->sends, m);
        } else if (m->started) {
            if (m->from->in.receive == m) m->from->in.receive = NULL; /* discard the rest */
            dequeue(&g->members[m->source].cleared, m);
            for (struct unexpected *u = g->members[m->source].unexpected.first; u; u = u->next)
                if (u->claimed_by == m) u->claimed_by = NULL;
        } else {
            dequeue(m->peer < 0 ? &g->posted_any : &g->members[m->peer].posted, m);
        }
    }
    free(m);
}

/* A sender may block in a large send before it sends the message of this receive.  After a receive has waited for a
 * while, this function therefore requests the payloads that its possible senders have offered, and buffers them. */
void buffer_unexpected(struct frd_message *m)
{
    struct frd_group *g = m->group;
    if (m->sends || m->started) return;
    for (int source = 0; source < g->group_ranks; source++) {
        if (m->peer >= 0 && m->peer != source) continue;
        struct queue *queue = &g->members[source].unexpected;
        struct unexpected *before = NULL;
        for (struct unexpected *u = queue->first; u; before = u, u = u->next) {
            if (u->header.kind != OFFER) continue;
            struct unexpected *buffered = malloc(sizeof *buffered + u->header.bytes);
            if (!buffered) return;
            *buffered = *u;
            buffered->header.kind = PAYLOAD;
            buffered->complete = false;
            u->from->in.buffered += u->header.bytes;
            if (before) before->next = buffered;
            else queue->first = buffered;
            if (queue->last == u) queue->last = buffered;
            free(u);
            u = buffered;
            clear_offer(u->from, &u->header);
        }
    }
}

void claim_early(struct frd_group *g)
{
    struct queue *early = &g->endpoint->early;
    for (struct unexpected *u = early->first, *next; u; u = next) {
        next = u->next;
        if (u->header.context != g->context) continue;
        take_out(early, u);
        if (is_sender(g, &u->header, u->from) && u->header.kind < GROUP_LEFT) {
            append(&g->members[u->header.source].unexpected, u);
        } else {
            if (is_sender(g, &u->header, u->from)) control(g, &u->header);
            drop(u);
        }
    }
}

/* Frees detached messages that will not be sent. */
static void free_detached(struct queue *queue)
{
    for (struct frd_message *m = queue->first; m; m = queue->first) {
        dequeue(queue, m);
        if (m->detached) finish(m, FRD_OK);
    }
}

void free_messages(struct frd_endpoint *e)
{
    for (struct unexpected *u = e->early.first, *next; u; u = next) {
        next = u->next;
        free(u);
    }
    for (int r = 0; r < e->ranks; r++) {
        free_detached(&e->peers[r].sends);
        free_detached(&e->peers[r].offered);
    }
    free(e->closed);
}

void clear_unexpected(struct frd_group *g)
{
    struct frd_endpoint *e = g->endpoint;
    uint64_t *closed = realloc(e->closed, (size_t)(e->closed_count + 1) * sizeof *closed);
    if (closed) {
        e->closed = closed;
        e->closed[e->closed_count++] = g->context;
    }
    for (int r = 0; r < g->group_ranks; r++) {
        for (struct unexpected *u = g->members[r].unexpected.first, *next; u; u = next) {
            next = u->next;
            drop(u);
        }
    }
}
