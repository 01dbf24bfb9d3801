/* The endpoint: the processes of a job, access to their memory, and the staging slots of this process. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "messages.h"

static struct frd_endpoint *closing; /* closed endpoints; freed after the peers have closed theirs */
static pthread_mutex_t closing_lock = PTHREAD_MUTEX_INITIALIZER;

/* Unique within this process; nonces of two processes are never compared. */
uint64_t new_nonce(void)
{
    static _Atomic uint64_t count;
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return ((uint64_t)t.tv_sec << 32 ^ (uint64_t)t.tv_nsec << 8 ^ (uint64_t)getpid() << 40) + 0x9e3779b97f4a7c15u * ++count;
}

bool is_alive(const struct peer *peer)
{
    struct pollfd process = {.fd = peer->process_descriptor, .events = POLLIN};
    return process.fd < 0 || poll(&process, 1, 0) != 1;
}

static bool has_closed(const struct peer *peer)
{
    const struct process_block *block = peer->block;
    return atomic_load(&block->identity.nonce) != peer->nonce || atomic_load(&block->identity.state) == GONE ||
           !is_alive(peer);
}

static void free_endpoint(struct frd_endpoint *e)
{
    free_rings(e);
    free_messages(e);
    for (int l = 0; l < e->locals; l++) {
        const struct peer *peer = &e->peers[e->local_peers[l]];
        if (peer->rank == e->rank) continue;
        unmap_arena(peer->arena);
        close(peer->process_descriptor);
    }
    atomic_store(&e->block->identity.nonce, 0);
    arena_give(e->block, sizeof *e->block);
    pthread_mutex_destroy(&e->lock);
    free(e->local_peers);
    free(e->peers);
    free(e);
}

static void free_closed_endpoints(void)
{
    pthread_mutex_lock(&closing_lock);
    for (struct frd_endpoint **list = &closing, *e = *list; e; e = *list) {
        bool all = true;
        for (int l = 0; l < e->locals && all; l++) {
            const struct peer *peer = &e->peers[e->local_peers[l]];
            all = peer->rank == e->rank || has_closed(peer);
        }
        if (all) {
            *list = e->next;
            free_closed_groups(); /* includes the groups of this endpoint */
            free_endpoint(e);
        } else {
            list = &e->next;
        }
    }
    pthread_mutex_unlock(&closing_lock);
}

struct frd_endpoint *frd_endpoint_open(int rank, int ranks)
{
    if (!arena_ready() || !is_rank(rank, ranks)) return NULL;
    free_closed_endpoints();
    struct frd_endpoint *e = calloc(1, sizeof *e);
    struct process_block *block = arena_take(sizeof *block);
    struct peer *peers = calloc((size_t)ranks, sizeof *peers);
    int *local_peers = calloc(FRD_MAX_RANKS, sizeof *local_peers);
    if (!e || !block || !peers || !local_peers) {
        if (block) arena_give(block, sizeof *block);
        free(e);
        free(peers);
        free(local_peers);
        return NULL;
    }
    memset(block, 0, sizeof *block);
    block->identity.arena = (uint64_t)(uintptr_t)arena_base();
    atomic_store(&block->identity.state, PRESENT);
    atomic_store(&block->identity.nonce, new_nonce());
    pthread_mutex_init(&e->lock, NULL);
    e->rank = rank;
    e->ranks = ranks;
    e->block = block;
    e->peers = peers;
    e->local_peers = local_peers;
    for (int r = 0; r < ranks; r++)
        peers[r] = (struct peer){.endpoint = e, .rank = r, .local = -1, .process_descriptor = -1, .transport = &over_tcp};
    return e;
}

uint64_t frd_endpoint_block(struct frd_endpoint *e) { return arena_offset(e->block); }

int frd_endpoint_add(struct frd_endpoint *e, int rank, int descriptor, size_t bytes, uint64_t block, int64_t pid)
{
    if (!is_rank(rank, e->ranks) || e->locals == FRD_MAX_RANKS) return EINVAL;
    struct peer *peer = &e->peers[rank];
    const bool self = rank == e->rank;
    int process = -1;
    if (!self) {
        process = (int)syscall(SYS_pidfd_open, pid, 0);
        if (process < 0) return errno;
        fcntl(process, F_SETFD, FD_CLOEXEC);
    }
    char *base = self ? arena_base() : map_arena(descriptor, bytes);
    if (!base) {
        const int error = errno;
        close(process);
        return error;
    }
    e->local_peers[e->locals] = rank;
    peer->local = e->locals++;
    peer->transport = &over_shared_memory;
    peer->arena = base;
    peer->arena_bytes = bytes;
    peer->block = (struct process_block *)(base + block);
    peer->nonce = atomic_load(&peer->block->identity.nonce);
    peer->arena_there = peer->block->identity.arena;
    peer->process_descriptor = process;
    return 0;
}

void frd_endpoint_close(struct frd_endpoint *e)
{
    progress_stop(e);
    tcp_stop(e);
    atomic_store(&e->block->identity.state, GONE);
    pthread_mutex_lock(&closing_lock);
    e->next = closing;
    closing = e;
    pthread_mutex_unlock(&closing_lock);
    free_closed_endpoints();
}

/* Closes only the child's copies of descriptors; the parent's connections stay open.  No lock is taken, because a
 * thread that does not exist in the child may hold it.  The memory is freed when the process ends. */
void frd_endpoint_forked(struct frd_endpoint *e)
{
    for (int r = 0; r < e->ranks; r++) close(e->peers[r].process_descriptor);
    tcp_close_sockets(e);
}

/* In a forked child, inherited endpoints belong to the parent. */
void forget_closed_endpoints(void)
{
    closing = NULL;
    pthread_mutex_init(&closing_lock, NULL);
    forget_closed_groups();
}

/* ---- other processes' memory ---- */

char *memory_of(const struct peer *peer, uint64_t address, size_t bytes)
{
    const uint64_t offset = address - peer->arena_there;
    return peer->arena && offset < peer->arena_bytes && bytes <= peer->arena_bytes - offset ? peer->arena + offset : NULL;
}

/* ---- staging slots ----
 *
 * A slot belongs to this process.  It may serve a call of group g
 *     - if g used it last: the rule in internal.h makes this safe;
 *     - if no group has used it, or its last group is closed;
 *     - if every peer in the slot's last group has published, after the slot's last staged call, that the peer has
 *       finished reading.
 * Until `release_stage` is called, only the thread that makes the call uses the slot.
 */

static pthread_mutex_t slot_lock = PTHREAD_MUTEX_INITIALIZER;
static struct slot *slots;
static pid_t slot_process;

static bool is_finished(const struct slot *slot)
{
    const struct frd_group *g = slot->user;
    for (int r = 0; g && r < g->ranks; r++) {
        const struct rank_line *line = &g->local[r].block->line;
        if (r == g->rank || has_gone(&g->local[r])) continue;
        if (atomic_load(&line->finished) < slot->end && atomic_load(&line->phase) <= slot->end) return false;
    }
    return true;
}

static struct slot *find_slot(const struct frd_group *g)
{
    struct slot *found = NULL;
    for (struct slot *slot = slots; slot; slot = slot->next) {
        if (slot->busy) continue;
        if (slot->user == g) return slot;
        if (!found && is_finished(slot)) found = slot;
    }
    return found;
}

bool acquire_stage(struct frd_group *g)
{
    pthread_mutex_lock(&slot_lock);
    if (slot_process != getpid()) { /* the first slot of this process, perhaps a forked child */
        slots = NULL;
        slot_process = getpid();
    }
    struct slot *slot = find_slot(g);
    if (!slot) {
        slot = calloc(1, sizeof *slot);
        if (slot) slot->memory = arena_take(2 * STAGE_BYTES);
        if (slot && slot->memory) {
            slot->next = slots;
            slots = slot;
        } else {
            free(slot);
            slot = NULL;
        }
    }
    if (slot) {
        slot->user = g;
        slot->busy = true;
    }
    g->slot = slot;
    g->local[g->rank].stage = slot ? slot->memory : NULL;
    pthread_mutex_unlock(&slot_lock);
    return slot;
}

void release_stage(struct frd_group *g, bool finished)
{
    if (finished) atomic_store_explicit(&g->line->finished, g->phase, memory_order_release);
    g->local[g->rank].stage = NULL;
    if (!g->slot) return;
    pthread_mutex_lock(&slot_lock);
    g->slot->end = finished ? g->phase : UINT64_MAX; /* after a failure: in use until the ranks have left */
    g->slot->busy = false;
    g->slot = NULL;
    pthread_mutex_unlock(&slot_lock);
}

void forget_stages_of(const struct frd_group *g)
{
    pthread_mutex_lock(&slot_lock);
    for (struct slot *slot = slots; slot; slot = slot->next)
        if (slot->user == g) slot->user = NULL;
    pthread_mutex_unlock(&slot_lock);
}
