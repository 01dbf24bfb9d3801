/* Collectives between the processes of one host, in shared memory: the interface that Python calls.
 *
 * Plain C11 and Linux system calls; no torch, no MPI, no Python headers.  Every function may be called
 * without the interpreter lock.  A group runs one collective at a time (the caller sees to the order);
 * point-to-point operations of the same group may run beside it from any thread.
 */
#ifndef FARANDOLE_CORE_H
#define FARANDOLE_CORE_H

#include <stddef.h>
#include <stdint.h>

#define FRD_ABI 2
#define FRD_MAX_RANKS 256
#define FRD_NOTE_BYTES 160
#define FRD_TOKEN_BYTES 32

/* An element type is (bytes per element << 8) | code; types that are only moved have codes of their own. */
enum frd_type_code {
    FRD_F32, FRD_F64, FRD_BF16, FRD_F16, FRD_I8, FRD_U8, FRD_I16, FRD_I32, FRD_I64, FRD_BOOL,
    FRD_REDUCIBLE_TYPES
};
enum frd_reduce_op {
    FRD_SUM, FRD_AVG, FRD_PRODUCT, FRD_MIN, FRD_MAX, FRD_AND, FRD_OR, FRD_XOR, FRD_REDUCE_OPS
};
enum frd_operation {
    FRD_NOTHING, FRD_ALL_REDUCE, FRD_REDUCE, FRD_REDUCE_SCATTER, FRD_ALL_GATHER, FRD_BROADCAST,
    FRD_GATHER, FRD_SCATTER, FRD_ALL_TO_ALL, FRD_BARRIER, FRD_SEND, FRD_RECV
};
enum frd_status {
    FRD_OK, FRD_DIED, FRD_LEFT, FRD_LATE, FRD_MISMATCH, FRD_UNEVEN, FRD_INTERRUPTED, FRD_UNSUPPORTED,
    FRD_PENDING, FRD_CLOSED, FRD_ELSEWHERE, FRD_MISFIT
};
enum frd_vector_level { FRD_PLAIN, FRD_AVX2, FRD_AVX512 };

/* What a rank says it is doing.  One cache line; compared between ranks before any data are used. */
struct frd_call {
    uint64_t index;      /* how many collectives this rank has begun in this group */
    uint32_t operation;  /* frd_operation */
    uint32_t type;       /* element type, as above */
    uint32_t op;         /* frd_reduce_op, 0 where there is none */
    int32_t root;        /* rank in the group, -1 where there is none; for point-to-point the peer */
    uint64_t count;      /* elements */
    uint64_t layout;     /* fingerprint of uneven counts; for point-to-point the tag */
    uint64_t region;     /* 1 + number of the shared buffer that holds the tensor, 0 if none does */
    uint64_t offset;     /* bytes from the start of that buffer */
    uint64_t reserved;
};

/* Why a group broke: written once, by the first rank that sees it, and read by all others. */
struct frd_failure {
    uint32_t status;     /* frd_status */
    int32_t culprit;     /* rank in the whole group */
    int32_t reporter;    /* likewise */
    int32_t missing;     /* FRD_LATE: how many ranks had not arrived */
    struct frd_call culprit_call;  /* the last call that the culprit made */
    struct frd_call reporter_call;
    char note[FRD_NOTE_BYTES];     /* how the culprit ended, in its own words, if it had time for them */
};

struct frd_group;
struct frd_message;  /* a point-to-point operation under way */

int frd_abi(void);
int frd_vector_level(void);          /* the best this processor has */
int frd_use_vector_level(int level); /* for tests: lower it; returns what is in use */
/* out = a op b, on this thread alone; out may be a or b */
int frd_combine(void *out, const void *a, const void *b, size_t count, int type, int op);
/* Functions of the interpreter, so that a waiting main thread still serves Ctrl-C. */
void frd_set_interrupts(int (*acquire)(void), void (*release)(int), int (*check)(void),
                        void (*fetch)(void **, void **, void **));
void frd_pending_interrupt(void **type, void **value, void **traceback);

size_t frd_segment_bytes(int ranks);
/* Maps the descriptor of a segment that is all zero or has been joined by other ranks of the group. */
struct frd_group *frd_join(int descriptor, int rank, int ranks, const int *process_descriptors);
void frd_announce(struct frd_group *, int64_t pid);
void frd_leave(struct frd_group *, const char *note);  /* tells the others; the mapping stays */
void frd_give_up(struct frd_group *);                  /* this process's calls under way return, with FRD_LEFT */
void frd_close(struct frd_group *);                    /* unmaps; no call may be under way */
void frd_set_timeout(struct frd_group *, double seconds);
/* Called, without the interpreter lock, on one of those who wait, when a rank is seconds late, and now and then. */
void frd_set_remark(struct frd_group *, void (*)(void));
void frd_get_failure(struct frd_group *, struct frd_failure *);
void frd_get_call(struct frd_group *, int rank, struct frd_call *);

/* Groups of several hosts.  `frd_join` is for the ranks of this host; then `frd_span` says which rank this one is in
 * the whole group, and which number each rank has on this host (-1: it is on another).  The ranks of other
 * hosts are reached over TCP: `listener` is a listening socket, which the group takes over; `own` the address
 * that connections leave from; `token` FRD_TOKEN_BYTES that only the ranks of the group know.  Addresses are
 * struct sockaddr. */
int frd_span(struct frd_group *, int rank, int ranks, const int *local_of);
int frd_wires_open(struct frd_group *, int listener, const void *own, size_t own_bytes, const char *token);
int frd_wires_address(struct frd_group *, int rank, const void *address, size_t bytes);
int frd_wires_start(struct frd_group *);               /* after all addresses */
void frd_wires_call(struct frd_group *, int rank);     /* open the connection now, not with the first send */
double frd_wires_silence(struct frd_group *, int rank); /* seconds since its host gave a sign of life; -1: unknown */
void frd_wires_hang_up(struct frd_group *);            /* close all: the other ends see it at once */
void frd_break(struct frd_group *, int culprit);       /* what was found out on another host holds here, too */
/* A call of the user's that is made of several collectives on this host: the ranks agree on it first, and
 * errors speak of it, until it is undeclared. */
int frd_declare(struct frd_group *, const struct frd_call *, int flags);
void frd_undeclare(struct frd_group *);

/* A shared buffer: rank r's part starts at base + r * stride.  All ranks add the same numbers. */
int frd_region_add(struct frd_group *, uint64_t number, void *base, size_t stride);
void frd_region_remove(struct frd_group *, uint64_t number);

/* Collectives.  `flags`: FRD_BACKGROUND gives the core up early while waiting, FRD_MAIN_THREAD serves
 * signals.  FRD_TRY is for frd_message_wait: at the deadline return FRD_PENDING and leave the group whole.
 * Counts are elements. */
enum frd_flags { FRD_BACKGROUND = 1, FRD_MAIN_THREAD = 2, FRD_TRY = 4 };
int frd_barrier(struct frd_group *, int flags);
int frd_all_reduce(struct frd_group *, void *data, size_t count, int type, int op, int flags);
int frd_reduce(struct frd_group *, void *data, size_t count, int type, int op, int root, int flags);
/* in[d] has counts[d] elements for rank d */
int frd_reduce_scatter(struct frd_group *, const void *const *in, const size_t *counts, void *out, int type,
                       int op, int flags);
int frd_all_gather(struct frd_group *, const void *in, void *const *out, const size_t *counts, int type,
                   int flags);
int frd_broadcast(struct frd_group *, void *data, size_t count, int type, int root, int flags);
int frd_gather(struct frd_group *, const void *in, void *const *out, size_t count, int type, int root,
               int flags);
int frd_scatter(struct frd_group *, const void *const *in, void *out, size_t count, int type, int root,
                int flags);
int frd_all_to_all(struct frd_group *, const void *const *in, const size_t *in_counts, void *const *out,
                   const size_t *out_counts, int type, int flags);

/* The same on one contiguous tensor of equal parts: the common case, with fewer arguments to build. */
int frd_reduce_scatter_even(struct frd_group *, const void *in, void *out, size_t count, int type, int op,
                            int flags);
int frd_all_gather_even(struct frd_group *, const void *in, void *out, size_t count, int type, int flags);

/* Point-to-point: post, then test or wait, then release.  `peer` -1 receives from any rank.  Tags below 0 are for
 * parts of collectives.
 * With `progress` a thread of the core moves the data while nobody waits. */
struct frd_message *frd_post_send(struct frd_group *, const void *data, size_t bytes, int type, int peer,
                                  int tag, int progress);
struct frd_message *frd_post_recv(struct frd_group *, void *data, size_t bytes, int type, int peer, int tag,
                                  int progress);
int frd_message_test(struct frd_group *, struct frd_message *); /* FRD_PENDING while it is under way */
int frd_message_wait(struct frd_group *, struct frd_message *, double timeout, int flags);
int frd_message_source(const struct frd_message *);
void frd_message_release(struct frd_group *, struct frd_message *);

#endif
