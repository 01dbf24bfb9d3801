/* The way to a process of the same host.
 *
 * Small messages go through a ring of bytes, one per pair and direction, in the sender's arena: one writer, one reader.
 * It has two counters that only grow.  The writer fills what is free and then publishes `written`; the reader empties
 * what is there and then publishes `taken`: so each sees only bytes that the other has finished with.  What is written
 * is padded to 64 bytes, which keeps copies aligned.
 *
 * Large messages are copied once, from memory to memory, in chunks.  The receiver claims chunks and reads them; the
 * sender, while it waits, claims chunks and writes them, so both cores work.  A chunk is claimed by adding to a counter, so
 * no two processes copy the same one.  A sender that gives up withdraws the transfer at any time without waiting for the
 * receiver, which finds this when it closes the transfer and fails the receive: the sender's memory may have changed while
 * it was read.  A receiver that gives up claims all chunks that are left and waits for the one that the sender is writing,
 * because nothing may write to its memory afterwards.  This wait ends after STOPPED_S, by which time the sender has been
 * stopped (SIGSTOP, a debugger), or the job would hang with it.  A stop takes effect after the system call that writes, so
 * the sender could write later only if it was stopped between its claim and that call, which are a few instructions apart.
 *
 * What a process does to another's streams it announces by that process's bell: a bit that says whose, and a counter on
 * which sleepers wait.
 */
#include <stdlib.h>
#include <string.h>

#include "messages.h"

#define RING_BYTES ((size_t)1 << 17)
#define CHUNK_BYTES ((size_t)1 << 17)
#define TRANSFERS_AT_ONCE 64 /* records that are made together */
#define STOPPED_S 5.0        /* no running process takes so long to copy a chunk */

struct ring {
    struct { _Atomic uint64_t bytes; } ALIGNED written;
    struct { _Atomic uint64_t bytes; } ALIGNED taken;
    _Atomic uint32_t ALIGNED full; /* the writer waits for room */
    char ALIGNED data[RING_BYTES];
};

static size_t padded(size_t bytes) { return (bytes + 63) / 64 * 64; }

/* ---- bells ---- */

static void wake(struct process_block *block)
{
    atomic_fetch_add(&block->bell.events, 1);
    if (atomic_load(&block->bell.sleepers) ||
        (atomic_load(&block->bell.thread_sleeps) && !atomic_load(&block->bell.attended)))
        futex_wake(&block->bell.events);
}

void ring_bell(struct peer *peer)
{
    const int from = peer->endpoint->peers[peer->endpoint->rank].local;
    atomic_fetch_or(&peer->block->bell.ready[from / 64], (uint64_t)1 << from % 64);
    wake(peer->block);
}

void ring_own_bell(struct frd_endpoint *e) { wake(e->block); }

static void look_again(struct peer *peer)
{
    struct process_block *own = peer->endpoint->block;
    atomic_fetch_or(&own->bell.ready[peer->local / 64], (uint64_t)1 << peer->local % 64);
    atomic_fetch_add(&own->bell.events, 1);
}

/* ---- rings ---- */

static struct ring *outward_ring(struct peer *peer)
{
    if (peer->outward) return peer->outward;
    struct ring *ring = arena_take(sizeof *ring);
    if (!ring) return NULL;
    memset(ring, 0, offsetof(struct ring, data));
    peer->outward = ring;
    atomic_store(&peer->endpoint->block->ring_to[peer->local], 1 + arena_offset(ring));
    return ring;
}

static struct ring *inward_ring(struct peer *peer)
{
    if (peer->inward) return peer->inward;
    const int own = peer->endpoint->peers[peer->endpoint->rank].local;
    const uint64_t place = atomic_load(&peer->block->ring_to[own]);
    if (place) peer->inward = (struct ring *)(peer->arena + place - 1);
    return peer->inward;
}

static size_t fill(struct ring *ring, const char *data, size_t bytes)
{
    uint64_t written = atomic_load_explicit(&ring->written.bytes, memory_order_relaxed);
    size_t space = RING_BYTES - (size_t)(written - atomic_load(&ring->taken.bytes));
    size_t moved = 0;
    while (space && moved < bytes) {
        const size_t at = written % RING_BYTES;
        const size_t piece = smaller(smaller(space, RING_BYTES - at), bytes - moved);
        memcpy(ring->data + at, data + moved, piece);
        moved += piece;
        written += padded(piece);
        space -= padded(piece);
    }
    atomic_store_explicit(&ring->written.bytes, written, memory_order_release);
    return moved;
}

static size_t put(struct peer *peer, const char *data, size_t bytes, bool more)
{
    (void)more;
    struct ring *ring = outward_ring(peer);
    if (!ring) return 0;
    size_t moved = fill(ring, data, bytes);
    if (moved == bytes) return moved;
    /* the reader empties, then looks at `full`; the writer sets it, then looks for room: one of them sees the other */
    atomic_store(&ring->full, 1);
    return moved + fill(ring, data + moved, bytes - moved);
}

static size_t take(struct peer *peer, char *data, size_t bytes)
{
    struct ring *ring = inward_ring(peer);
    if (!ring) return 0;
    uint64_t taken = atomic_load_explicit(&ring->taken.bytes, memory_order_relaxed);
    size_t there = (size_t)(atomic_load_explicit(&ring->written.bytes, memory_order_acquire) - taken);
    size_t moved = 0;
    if (!there) return 0;
    while (there && moved < bytes) {
        const size_t at = taken % RING_BYTES;
        const size_t piece = smaller(smaller(there, RING_BYTES - at), bytes - moved);
        memcpy(data + moved, ring->data + at, piece);
        moved += piece;
        taken += padded(piece);
        there -= padded(piece);
    }
    atomic_store(&ring->taken.bytes, taken);
    return moved;
}

/* After some bytes were taken. */
static void tell_of_room(struct peer *peer)
{
    struct ring *ring = peer->inward;
    if (!ring || !atomic_load(&ring->full)) return;
    atomic_store(&ring->full, 0);
    ring_bell(peer);
}

static bool never(const struct peer *peer, bool sends)
{
    (void)peer;
    (void)sends;
    return false; /* what has been written can be read whatever became of the writer */
}

const struct transport over_shared_memory = {
    .put = put, .take = take, .moved_out = ring_bell, .moved_in = tell_of_room, .again = look_again,
    .has_ended = never,
};

void free_rings(struct frd_endpoint *e)
{
    for (int r = 0; r < e->ranks; r++)
        if (e->peers[r].outward) arena_give(e->peers[r].outward, sizeof(struct ring));
    for (int i = 0; i < e->transfer_block_count; i++)
        arena_give(e->transfer_blocks[i], TRANSFERS_AT_ONCE * sizeof(struct transfer));
    free(e->transfer_blocks);
}

/* ---- transfers ---- */

static bool make_transfers(struct frd_endpoint *e)
{
    struct transfer **free_list =
        realloc(e->free_transfers, (size_t)(e->transfer_block_count + 1) * TRANSFERS_AT_ONCE * sizeof *free_list);
    if (!free_list) return false;
    e->free_transfers = free_list;
    void **blocks = realloc(e->transfer_blocks, (size_t)(e->transfer_block_count + 1) * sizeof *blocks);
    if (!blocks) return false;
    e->transfer_blocks = blocks;
    struct transfer *made = arena_take(TRANSFERS_AT_ONCE * sizeof *made);
    if (!made) return false;
    e->transfer_blocks[e->transfer_block_count++] = made;
    for (int i = 0; i < TRANSFERS_AT_ONCE; i++) e->free_transfers[e->free_transfer_count++] = &made[i];
    return true;
}

static uint64_t chunks_of(const struct frd_message *m) { return (m->bytes + CHUNK_BYTES - 1) / CHUNK_BYTES; }

bool offer_transfer(struct frd_message *m)
{
    struct frd_endpoint *e = m->group->endpoint;
    struct peer *peer = m->group->members[m->peer].peer;
    if (peer->local < 0 || m->bytes <= EAGER_BYTES) return false;
    const bool shared = is_shared(m->data, m->bytes) || peer->rank == e->rank;
    if (!shared && !atomic_load(&peer->block->reads[e->peers[e->rank].local])) return false;
    if (!e->free_transfer_count && !make_transfers(e)) return false;
    struct transfer *t = e->free_transfers[--e->free_transfer_count];
    t->failed = 0;
    atomic_store(&t->claimed, 0);
    atomic_store(&t->copied, 0);
    atomic_store(&t->state, OFFERED);
    m->transfer = t;
    m->header.kind = RENDEZVOUS;
    m->header.address = (uint64_t)(uintptr_t)m->data;
    m->header.transfer = 1 + arena_offset(t);
    return true;
}

void open_transfer(struct frd_message *m, struct peer *from, const struct header *header)
{
    struct transfer *t = (struct transfer *)(from->arena + header->transfer - 1);
    uint32_t offered = OFFERED;
    m->from = from;
    m->address = header->address;
    m->transfer = t;
    t->target = (uint64_t)(uintptr_t)m->data;
    if (atomic_compare_exchange_strong(&t->state, &offered, OPEN)) {
        if (m->bytes > CHUNK_BYTES) ring_bell(from); /* it may help */
    } else { /* the sender has withdrawn it, and broken the group */
        m->transfer = NULL;
        atomic_store(&t->state, CLOSED);
        ring_bell(from);
    }
}

bool can_copy(const struct frd_message *m)
{
    const struct transfer *t = m->transfer;
    return t && (!m->sends || atomic_load(&t->state) == OPEN) && atomic_load(&t->claimed) < chunks_of(m);
}

bool copy_chunk(struct frd_message *m)
{
    struct transfer *t = m->transfer;
    const uint64_t chunks = chunks_of(m);
    if (!can_copy(m)) return false;
    const uint64_t chunk = atomic_fetch_add(&t->claimed, 1);
    if (chunk >= chunks) return false;
    const size_t start = (size_t)chunk * CHUNK_BYTES, bytes = smaller(CHUNK_BYTES, m->bytes - start);
    const bool copied = m->sends
        ? write_memory(m->group->members[m->peer].peer, t->target + start, m->data + start, bytes)
        : read_memory(m->from, m->data + start, m->address + start, bytes);
    if (!copied) t->failed = 1;
    if (atomic_fetch_add(&t->copied, 1) == chunks - 1 && m->sends) ring_bell(m->group->members[m->peer].peer);
    return true;
}

bool has_ended(const struct frd_message *m)
{
    const struct transfer *t = m->transfer;
    return m->sends ? atomic_load(&t->state) == CLOSED : atomic_load(&t->copied) >= chunks_of(m);
}

/* The receiver's last access: from here on the record is the sender's.  False: the sender has withdrawn the payload. */
static bool close_transfer(struct transfer *t, struct peer *from)
{
    const bool valid = atomic_exchange(&t->state, CLOSED) == OPEN;
    ring_bell(from);
    return valid;
}

void end_transfer(struct frd_message *m)
{
    struct transfer *t = m->transfer;
    const struct peer *peer = m->sends ? m->group->members[m->peer].peer : m->from;
    const bool failed = t->failed;
    int reason = failed ? why_unreadable(peer) : FRD_OK;
    if (m->sends) {
        struct frd_endpoint *e = m->group->endpoint;
        e->free_transfers[e->free_transfer_count++] = t;
    } else {
        m->moved = m->bytes;
        if (!close_transfer(t, m->from)) reason = FRD_INTERRUPTED;
    }
    m->transfer = NULL;
    const struct frd_call call = call_of_message(m);
    finish(m, reason ? break_group(m->group, reason, m->sends ? m->peer : m->source, &call) : FRD_OK);
}

bool fetch(struct peer *from, const struct header *h, char *data)
{
    struct transfer *t = (struct transfer *)(from->arena + h->transfer - 1);
    uint32_t offered = OFFERED;
    atomic_store(&t->claimed, UINT32_MAX); /* the sender does not know this buffer, so it cannot help */
    const bool opened = atomic_compare_exchange_strong(&t->state, &offered, OPEN);
    t->failed = !opened || !read_memory(from, data, h->address, h->bytes);
    const bool fetched = !t->failed;
    return close_transfer(t, from) && fetched;
}

/* The record of a withdrawn send is not used again: the receiver may yet write to it. */
void abort_transfer(struct frd_message *m)
{
    struct transfer *t = m->transfer;
    m->transfer = NULL;
    if (m->sends) {
        atomic_store(&t->state, WITHDRAWN);
        return;
    }
    const uint64_t chunks = chunks_of(m), claimed = atomic_exchange(&t->claimed, chunks);
    const double deadline = seconds_now() + STOPPED_S;
    while (atomic_load(&t->copied) < smaller((size_t)claimed, (size_t)chunks) && is_alive(m->from) &&
           seconds_now() < deadline)
        yield_core();
    t->failed = 1;
    close_transfer(t, m->from);
}
