/* What the ranks of a group share, and what each keeps for itself.
 *
 * The shared segment, all zero at first:
 *
 *     header | rank lines | pair tables | staging halves of every rank | message rings of every pair
 *
 * Collectives advance in phases.  A rank ends its phase p by publishing p + 1 in its line and waiting until
 * every other rank has published at least p + 1.  All staging memory exists in two halves, and one rule
 * makes every protocol in this folder safe:
 *
 *     In phase p, half p mod 2 of a rank's memory is that rank's alone.  The other half is its peers': to
 *     read, or, where a protocol gives each peer a part of it, to read and write that part.
 *
 * Proof.  (No two at once.)  A half changes hands between phase p and p + 1.  Whoever has it in phase p + 1
 * has seen every rank publish p + 1, which each does after its last access in phase p; and phases of two
 * ranks that overlap are equal, because no rank enters p + 1 before all have ended p.  (In order.)  Publishing
 * is a release, seeing it an acquire.  Both hold across calls, because the count of phases runs on from call
 * to call.  So one wait per phase is enough, and there is nothing to reset.
 */
#ifndef FARANDOLE_INTERNAL_H
#define FARANDOLE_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "core.h"
#include "mail.h"

#define LINE 128 /* two 64-byte lines: processors fetch them in pairs */
#define ALIGNED __attribute__((aligned(LINE)))

/* Staging of a rank, one half.  Divided among n ranks it gives windows that stay in the second-level cache
 * for two ranks and in the first for eight. */
#ifndef STAGE_BYTES
#define STAGE_BYTES ((size_t)1 << 18)
#endif
#define SMALL_BYTES ((size_t)1 << 14) /* up to here one phase serves a whole call */
#define RING_BYTES ((size_t)1 << 18)

#define PATIENCE_S 5.0

enum rank_state { ABSENT, PRESENT, GONE };
enum broken_state { WHOLE, BREAKING, BROKEN };

struct header {
    _Atomic uint32_t broken;
    struct frd_failure failure;
} ALIGNED;

struct rank_line {
    _Atomic uint64_t phase;     /* phases that this rank has ended */
    _Atomic uint32_t sleepers;  /* ranks asleep until it changes */
    struct {
        _Atomic uint32_t rings;     /* counts what others did to this rank's messages */
        _Atomic uint32_t sleepers;
    } ALIGNED doorbell;
    struct {
        _Atomic uint32_t state;
        int64_t pid;
        char note[FRD_NOTE_BYTES];
    } ALIGNED life;
    struct frd_call ALIGNED call[2]; /* by half */
    struct frd_call message_call;    /* the last point-to-point call, for messages to people only */
} ALIGNED;

/* What rank `from` sends to rank `to` (or expects from it) in an uneven exchange. */
struct pair_table {
    uint64_t sends[2][FRD_MAX_RANKS][FRD_MAX_RANKS];
    uint64_t receives[2][FRD_MAX_RANKS][FRD_MAX_RANKS];
};

struct stage {
    char half[2][STAGE_BYTES];
} ALIGNED;

struct ring {
    struct { _Atomic uint64_t bytes; } ALIGNED written;
    struct { _Atomic uint64_t bytes; } ALIGNED taken;
    char data[RING_BYTES];
} ALIGNED;

struct region {
    uint64_t number;
    char *base;
    size_t stride;
};

struct frd_group {
    int rank, ranks;             /* on this host */
    int rank_of[FRD_MAX_RANKS];  /* in the whole group */
    char *segment;
    struct header *header;
    struct rank_line *lines;
    struct pair_table *pairs;
    struct stage *stages;
    struct ring *rings;          /* [from * ranks + to] */

    uint64_t phase;              /* of this rank */
    uint64_t calls;
    struct frd_call current;
    struct frd_call declared;    /* of the caller's call that the next ones are parts of; FRD_NOTHING: none */
    double timeout, begun, deadline;
    double remark_at;            /* when to say next that somebody is late */
    void (*remark)(void);
    int flags;
    atomic_bool given_up;        /* this process leaves: do not wait any longer */
    atomic_int crowded;          /* > 0: somebody else wants this core, so do not spin */
    int process_descriptors[FRD_MAX_RANKS];

    pthread_mutex_t region_lock; /* buffers may be freed while a collective runs on others */
    struct region *regions;
    int region_count, region_capacity;

    struct mail mail;            /* point-to-point */
};

/* waiting.c */
double seconds_now(void);
void relax(void);
void wake_if_asleep(_Atomic uint32_t *word, _Atomic uint32_t *sleepers);
void sleep_while(_Atomic uint32_t *word, uint32_t value, _Atomic uint32_t *sleepers, double seconds);
void yield_core(struct frd_group *);
bool interrupted(void);
bool has_ended(struct frd_group *, int rank);  /* its process, by the kernel's word */
int end_phase(struct frd_group *);             /* publish, and wait for all */

/* group.c: finds the shared buffer that holds [data, data + bytes); number 0 if none does */
struct region find_region(struct frd_group *, const void *data, size_t bytes);

/* failure.c; culprits are numbered as in the whole group */
int break_group(struct frd_group *, int status, int culprit, const struct frd_call *own);
int break_between(struct frd_group *, int status, int culprit, const struct frd_call *theirs, const struct frd_call *own);
int broken_status(struct frd_group *);

/* agreement.c */
void begin_call(struct frd_group *, struct frd_call call, int flags);
void locate(struct frd_group *, struct frd_call *, struct region *, const void *data, size_t bytes);
int agree(struct frd_group *);                 /* end the first phase and compare the calls */
bool all_in_region(const struct frd_group *);  /* after agree: is every rank's tensor at the same place? */

static inline int half_of(uint64_t phase) { return (int)(phase & 1); }
static inline size_t element_bytes(int type) { return (size_t)type >> 8; }
static inline size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

/* How much of a half each rank's part gets where a half is divided among all ranks. */
static inline size_t window_of(const struct frd_group *g) { return STAGE_BYTES / (size_t)g->ranks / 64 * 64; }

_Static_assert(SMALL_BYTES <= STAGE_BYTES && STAGE_BYTES / FRD_MAX_RANKS >= 64, "a half holds a part of every rank");

/* Tells two lists of counts apart (FNV-1a, by words). */
static inline uint64_t fingerprint(const size_t *counts, int ranks)
{
    uint64_t hash = 14695981039346656037u;
    for (int r = 0; r < ranks; r++) hash = (hash ^ counts[r]) * 1099511628211u;
    return hash;
}

/* The part of `total` bytes that falls in the step-th window of `window` bytes. */
static inline size_t window_bytes(size_t total, size_t step, size_t window)
{
    const size_t start = step * window;
    return start >= total ? 0 : smaller(total - start, window);
}

#endif
