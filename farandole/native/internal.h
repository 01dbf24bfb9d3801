/* Internal data structures: memory shared by processes and memory private to each process.
 *
 *     arena.c        this process's shared memory and its allocator
 *     endpoint.c     the other processes of the job; staging slots
 *     group.c        opening and closing a communicator
 *     agreement.c    before the ranks use any data, they verify that they are in the same call
 *     waiting.c      how a rank waits, and the failures that it detects while waiting
 *     failure.c      the failure record of a group
 *     reduce.c, exchange.c   collectives
 *     messages.h     point-to-point
 *
 * A process has one arena, which the other processes of its host map once.  All shared data are in the arena of the
 * process that writes them: the lines and payloads of its groups, staging slots, message rings, user buffers.
 * An address in another arena is (process, offset), so any group can use it, and the offsets of ranks may differ.
 *
 * Collectives advance in phases.  A rank ends its phase p by publishing p + 1 in its line of the group and waiting
 * until every other rank has published at least p + 1.  Payloads and staging slots have two halves, and one rule makes
 * every protocol in this folder safe:
 *
 *     In phase p, only the rank itself accesses half p mod 2 of its memory.  Only its peers access the other half:
 *     they read it, or, if the protocol assigns each peer a part, they read and write that part.
 *
 * Proof.  (Mutual exclusion.)  The ranks that may access a half change between phases p and p + 1.  A rank that
 * accesses the half in phase p + 1 has seen every rank publish p + 1.  Every rank publishes p + 1 after its last access
 * in phase p.  No rank enters phase p + 1 before all ranks have ended phase p, so two ranks never access a half in
 * different phases at the same time.  (Memory order.)  Publishing is a release, and reading the published number is an
 * acquire.  Both properties hold across calls, because the phase number keeps increasing from call to call.  So one
 * wait per phase is enough, and no counter is ever reset.
 *
 * Staging slots belong to the process, not to a group.  A call announces its slot in its record.  After the last call
 * that uses a slot, the slot may serve another group once every peer has finished reading it: see `acquire_stage`.
 */
#ifndef FARANDOLE_INTERNAL_H
#define FARANDOLE_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "core.h"

#define LINE 128 /* two 64-byte lines: processors fetch them in pairs */
#define ALIGNED __attribute__((aligned(LINE)))

/* The size of one half of a rank's staging slot.  If a half is divided among the ranks, each part fits in the
 * second-level cache with two ranks, and in the first-level cache with eight ranks. */
#ifndef STAGE_BYTES
#define STAGE_BYTES ((size_t)1 << 18)
#endif
#define PAYLOAD_BYTES ((size_t)1 << 11) /* up to this size, values follow the record of a call and need no slot */
#define SMALL_BYTES ((size_t)1 << 14)   /* up to this size a whole call takes one phase */

#define NOTICEABLE_S 1.0
#define STALL_WARNING_S 4.0

enum rank_state { ABSENT, PRESENT, GONE };
enum broken_state { WHOLE, BREAKING, BROKEN };

/* A rank's part of a group.  After all members have left the group, the memory may be reused with another nonce. */
struct rank_line {
    _Atomic uint64_t phase;     /* number of phases that this rank has ended */
    _Atomic uint32_t sleepers;  /* ranks asleep until `phase` changes */
    _Atomic uint64_t finished;  /* a phase: this rank has finished reading its peers' staging slots of earlier phases */
    struct {
        _Atomic uint64_t nonce;
        _Atomic uint32_t state;
        char note[FRD_NOTE_BYTES];
    } ALIGNED life;
    struct frd_call ALIGNED call[2]; /* index: half */
    struct frd_call message_call;    /* the last point-to-point call, only for error messages and warnings */
    _Atomic uint32_t waits;          /* this rank has waited in that call for NOTICEABLE_S */
} ALIGNED;

struct group_block {
    struct rank_line line;
    struct { /* used only in the block of the first rank of the host */
        _Atomic uint32_t broken;
        struct frd_failure failure;
    } ALIGNED record;
    char ALIGNED payload[2][PAYLOAD_BYTES];
};

struct peer;
struct frd_endpoint;

/* A rank of the group on this host. */
struct local_rank {
    struct group_block *block;
    uint64_t nonce;
    struct peer *peer;
    char *stage;                 /* both halves of its staging slot in the current call; NULL if it has none */
};

struct queue {
    void *first, *last;
};

/* A rank of the whole group, and the messages to and from it that wait for their counterparts. */
struct member {
    struct peer *peer;
    int local;                   /* its number on this host, -1 if it is on another host */
    bool gone;                   /* it is on another host and has left the group */
    struct queue posted;         /* receives */
    struct queue cleared;        /* receives that have requested an offered payload */
    struct queue unexpected;     /* unexpected messages, oldest first */
};

struct frd_group {
    struct frd_endpoint *endpoint;
    struct frd_group *next;      /* in the endpoint's table of contexts, or among closing groups */
    uint64_t context;
    int rank, ranks;             /* on this host */
    int group_rank, group_ranks; /* in the whole group */
    struct local_rank *local;
    struct member *members;
    int *rank_of;                /* local rank -> rank in the whole group */
    struct queue posted_any;     /* receives from any rank */
    uint64_t receives_posted;

    struct group_block *own;
    struct rank_line *line;      /* own */
    uint64_t phase;              /* of this rank */
    uint64_t calls;
    struct frd_call current;
    struct frd_call declared;    /* the caller's call that contains the next calls; FRD_NOTHING: none */
    struct slot *slot;           /* staging slot of the current call */
    double timeout;              /* of messages */
    double call_timeout;         /* of collectives */
    double begun, deadline;      /* of the current collective */
    double warn_at;              /* time of the next stall warning */
    void (*stall_warning)(double waited, double timeout);
    int flags;
    atomic_bool given_up;        /* this process leaves the group: stop waiting */
    atomic_bool seen_broken;
    bool told_broken;
    int crowded;                 /* > 0: another thread wants this core, so do not spin */
};

/* Staging memory of this process: two halves of STAGE_BYTES. */
struct slot {
    struct slot *next;
    char *memory;
    struct frd_group *user;      /* the group that uses the slot, or used it last */
    uint64_t end;                /* phase of `user` after the last use of the slot */
    bool busy;
};

/* arena.c */
void *arena_take(size_t bytes);                /* aligned to LINE, uninitialized; NULL: the arena is full */
void arena_give(void *memory, size_t bytes);
uint64_t arena_offset(const void *memory);     /* of memory in the own arena */
char *arena_base(void);
bool arena_ready(void);                        /* whether this process has an arena; a forked child has none */
char *map_arena(int descriptor, size_t bytes); /* the arena of another process; NULL on failure, with errno */
void unmap_arena(char *base);
void arena_hold(int change);                   /* +1: hold back freed memory, which peers may still use; -1: undo */

/* endpoint.c */
bool is_alive(const struct peer *);            /* whether its process exists */
bool has_gone(const struct local_rank *);      /* whether it left the group or its process has ended */
bool acquire_stage(struct frd_group *);        /* before `begin_call`; false: out of memory */
void release_stage(struct frd_group *, bool finished);
void free_closed_groups(void);                 /* group.c */
void forget_closed_groups(void);               /* in a forked child */
void forget_closed_endpoints(void);            /* likewise */
void forget_stages_of(const struct frd_group *);
uint64_t new_nonce(void);
/* The memory at an address of a peer, as mapped here; NULL outside the peer's arena. */
char *memory_of(const struct peer *, uint64_t address, size_t bytes);

/* waiting.c */
double seconds_now(void);
void relax(void);
void futex_wait(const void *word, uint32_t value, double seconds);
void futex_wake(const void *word);
bool yield_core(void);                         /* true if another thread ran */
bool interrupted(void);
int end_phase(struct frd_group *);             /* publish the phase and wait for all ranks */

/* failure.c; `culprit` is a rank of the whole group */
int break_group(struct frd_group *, int status, int culprit, const struct frd_call *own);
int break_between(struct frd_group *, int status, int culprit, const struct frd_call *theirs,
                  const struct frd_call *own);
int broken_status(struct frd_group *);

/* agreement.c */
void begin_call(struct frd_group *, struct frd_call, int flags);
int agree(struct frd_group *);                 /* end the first phase and compare the calls */
const struct frd_call *call_of(const struct frd_group *, int local_rank); /* after agree */
/* after agree: store the addresses of all ranks' tensors, as mapped here; false unless all are in shared memory */
bool find_sources(struct frd_group *, size_t bytes, char **sources);
bool find_targets(struct frd_group *, size_t bytes, char **targets);
bool is_shared(const void *data, size_t bytes); /* whether the data are in this process's arena */
static inline uint64_t address_if_shared(const void *data, size_t bytes)
{
    return is_shared(data, bytes) ? (uint64_t)(uintptr_t)data : 0;
}

static inline bool is_rank(int rank, int ranks) { return rank >= 0 && rank < ranks; }
static inline int half_of(uint64_t phase) { return (int)(phase & 1); }
static inline size_t element_bytes(int type) { return (size_t)type >> 8; }
static inline size_t smaller(size_t a, size_t b) { return a < b ? a : b; }
/* The memory in which a rank offers the data of a call: its staging slot if it has one, else its payload. */
static inline char *offer_of(const struct frd_group *g, int rank, int half)
{
    const struct local_rank *local = &g->local[rank];
    return local->stage ? local->stage + (size_t)half * STAGE_BYTES : local->block->payload[half];
}

/* The size in bytes of each rank's part when a half is divided among all ranks. */
static inline size_t window_of(const struct frd_group *g) { return STAGE_BYTES / (size_t)g->ranks / 64 * 64; }

_Static_assert(SMALL_BYTES <= STAGE_BYTES && STAGE_BYTES / FRD_MAX_RANKS >= 64, "a half holds a part for every rank");

/* A number that distinguishes lists of counts (FNV-1a, by words). */
static inline uint64_t fingerprint(const size_t *counts, int ranks)
{
    uint64_t hash = 14695981039346656037u;
    for (int r = 0; r < ranks; r++) hash = (hash ^ counts[r]) * 1099511628211u;
    return hash;
}

/* The number of bytes in the step-th window when `total` bytes are divided into windows of `window` bytes. */
static inline size_t window_bytes(size_t total, size_t step, size_t window)
{
    const size_t start = step * window;
    return start >= total ? 0 : smaller(total - start, window);
}

#endif
