/* A ring of bytes between two ranks of a host: one writer, one reader.
 *
 * It has two counters that only grow.  The writer fills what is free and then publishes `written`; the
 * reader empties what is there and then publishes `taken`: so each sees only bytes that the other has
 * finished with.  What is written is padded to 64 bytes, which keeps copies aligned.
 *
 * What a rank does to another's rings it announces by that rank's doorbell, on which idle waiters sleep.
 */
#include <string.h>

#include "internal.h"

static size_t padded(size_t bytes) { return (bytes + 63) / 64 * 64; }

size_t ring_put(struct ring *ring, const char *data, size_t bytes)
{
    uint64_t written = atomic_load_explicit(&ring->written.bytes, memory_order_relaxed);
    size_t space = RING_BYTES - (size_t)(written - atomic_load_explicit(&ring->taken.bytes, memory_order_acquire));
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

size_t ring_take(struct ring *ring, char *data, size_t bytes)
{
    uint64_t taken = atomic_load_explicit(&ring->taken.bytes, memory_order_relaxed);
    size_t there = (size_t)(atomic_load_explicit(&ring->written.bytes, memory_order_acquire) - taken);
    size_t moved = 0;
    while (there && moved < bytes) {
        const size_t at = taken % RING_BYTES;
        const size_t piece = smaller(smaller(there, RING_BYTES - at), bytes - moved);
        memcpy(data + moved, ring->data + at, piece);
        moved += piece;
        taken += padded(piece);
        there -= padded(piece);
    }
    atomic_store_explicit(&ring->taken.bytes, taken, memory_order_release);
    return moved;
}

void ring_doorbell(struct frd_group *g, int local)
{
    struct rank_line *line = &g->lines[local];
    atomic_fetch_add(&line->doorbell.rings, 1);
    wake_if_asleep(&line->doorbell.rings, &line->doorbell.sleepers);
}
