/* Communication between the processes of a job: the interface that Python calls.
 *
 * Plain C11 and Linux system calls; no torch, no MPI, no Python headers.  Every function may be called without the
 * interpreter lock.
 *
 *     arena      this process's shared memory, which every other process of the host maps once
 *     endpoint   this process's connection to the other processes of a job: their arenas, TCP, progress
 *     group      a communicator: some processes of an endpoint, their collectives and messages
 *
 * A group runs one collective at a time (the caller keeps the order).  Collectives of different groups, and
 * point-to-point operations of any group, may run at the same time on any thread.
 */
#ifndef FARANDOLE_CORE_H
#define FARANDOLE_CORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#pragma GCC visibility push(default) /* the library exports what this file declares, and nothing else */

#define FRD_ABI 10
#define FRD_MAX_RANKS 256 /* of one host */
#define FRD_NOTE_BYTES 160
#define FRD_KEY_BYTES 32
#define FRD_LARGEST_BLOCK 4096

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
    FRD_GATHER, FRD_SCATTER, FRD_ALL_TO_ALL, FRD_BARRIER, FRD_SEND, FRD_RECV, FRD_SCAN, FRD_EXSCAN
};
enum frd_status {
    FRD_OK, FRD_DIED, FRD_LEFT, FRD_LATE, FRD_MISMATCH, FRD_UNEVEN, FRD_INTERRUPTED, FRD_UNSUPPORTED,
    FRD_PENDING,
    FRD_CLOSED,     /* the connection to a rank of another host was closed */
    FRD_ELSEWHERE,  /* the group was broken on another host */
    FRD_MISFIT,     /* a part of a hierarchical collective has another size than expected */
    FRD_INVALID,    /* a root or peer that the group does not have */
    FRD_NO_MEMORY,
    FRD_SILENT      /* the host of a rank has given no sign of life for FRD_SILENCE_S */
};
#define FRD_SILENCE_S 15.0
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
    uint64_t stage;      /* 1 + offset in this rank's arena of its staging slot; 0: the payload follows the record */
    uint64_t source;     /* address, in this rank's process, of its tensor if that lies in its arena: the others may read it */
    uint64_t target;     /* likewise of what they may write */
};

/* Why a group broke: written once, by the first rank that sees it, and read by all others. */
struct frd_failure {
    uint32_t status;     /* frd_status */
    int32_t culprit;     /* rank in the group */
    int32_t reporter;    /* likewise */
    int32_t missing;     /* FRD_LATE: how many ranks had not arrived */
    struct frd_call culprit_call;  /* the last call that the culprit made */
    struct frd_call reporter_call;
    char note[FRD_NOTE_BYTES];     /* how the culprit ended, in its own words, if it had time for them */
};

struct frd_endpoint;
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

/* ---- shared memory of this process ---- */

/* Map this process's own arena, an empty memory file of `bytes`; once per process (a forked child has none). */
int frd_arena_open(int descriptor, size_t bytes);
size_t frd_arena_bytes(void);          /* 0: this process has no arena */
void *frd_alloc(size_t bytes);         /* whole pages of the own arena; NULL: the arena is full */
void frd_free(void *);                 /* gives the memory back when no other process uses it any more */
size_t frd_arena_used(void);           /* bytes handed out by frd_alloc, or held back after frd_free */

/* ---- endpoints ---- */

/* Process `rank` of the `ranks` processes of a job.  Then every other process of this host is added, or its address,
 * before the first group is opened. */
struct frd_endpoint *frd_endpoint_open(int rank, int ranks);
uint64_t frd_endpoint_block(struct frd_endpoint *);   /* where the own arena has what other processes need */
/* A process of this host, this one too: a descriptor of its arena (the caller closes it), and where its block is there.
 * 0, or the error number of what the system refused. */
int frd_endpoint_add(struct frd_endpoint *, int rank, int descriptor, size_t bytes, uint64_t block, int64_t pid);
void frd_endpoint_close(struct frd_endpoint *);       /* after all its groups */
void frd_endpoint_forked(struct frd_endpoint *);      /* in a forked child, which has no other thread: closes its sockets */

/* Processes of other hosts, over TCP.  `listener` is a listening socket, which the endpoint takes over; `own` the
 * address that connections leave from; `key` FRD_KEY_BYTES that only the processes of the job know.  Addresses
 * are struct sockaddr. */
int frd_tcp_open(struct frd_endpoint *, int listener, const void *own, size_t own_bytes,
                 const unsigned char *key, double timeout);
int frd_tcp_add(struct frd_endpoint *, int rank, const void *address, size_t bytes);
int frd_tcp_start(struct frd_endpoint *);             /* after all addresses */

/* ---- groups ---- */

/* Reserve this process's part of a group: its place in the own arena. */
uint64_t frd_group_reserve(void);
void frd_group_unreserve(uint64_t block);             /* of a group that was not opened */
/* `members` are ranks of the endpoint, `blocks` what each of this host has reserved.  `context` is a number that no
 * other group of two of these processes has; in the group of context 0 a failure breaks nothing. */
struct frd_group *frd_group_open(struct frd_endpoint *, uint64_t context, int rank, int ranks, const int *members,
                                 const uint64_t *blocks);
void frd_leave(struct frd_group *, const char *note);  /* tells the others; the memory stays */
void frd_give_up(struct frd_group *);                  /* this process's calls under way return, with FRD_LEFT */
void frd_close(struct frd_group *);                    /* no call may be under way */
void frd_set_timeout(struct frd_group *, double seconds);
/* Called, without the interpreter lock, on a waiting rank when another one is seconds late, and now and then. */
void frd_set_stall_warning(struct frd_group *, void (*)(void));
void frd_get_failure(struct frd_group *, struct frd_failure *);
void frd_get_call(struct frd_group *, int local_rank, struct frd_call *);
/* Has the rank waited for a message for a second?  Then for which. */
bool frd_get_wait(struct frd_group *, int local_rank, struct frd_call *);
void frd_connect(struct frd_group *, int rank);        /* open the connection now, not with the first send */
double frd_silence(struct frd_group *, int rank);      /* seconds since its host gave a sign of life; -1: unknown */
void frd_break(struct frd_group *, int culprit);       /* what was found out on another host holds here, too */
void frd_tell_broken(struct frd_group *);              /* have the group break on all its hosts */
/* A call of the user's that is made of several collectives on this host: the ranks agree on it first, and
 * errors speak of it, until it is undeclared. */
int frd_declare(struct frd_group *, const struct frd_call *, int flags);
void frd_undeclare(struct frd_group *);

/* Collectives among the ranks of a group on this host.  `flags`: FRD_BACKGROUND sleeps early while waiting,
 * FRD_MAIN_THREAD serves signals.  FRD_TRY is for frd_message_wait: at the deadline return FRD_PENDING and leave the
 * group whole.  Counts are elements. */
enum frd_flags { FRD_BACKGROUND = 1, FRD_MAIN_THREAD = 2, FRD_TRY = 4 };
int frd_barrier(struct frd_group *, int flags);
int frd_all_reduce(struct frd_group *, void *data, size_t count, int type, int op, int flags);
int frd_all_reduce_to(struct frd_group *, const void *in, void *out, size_t count, int type, int op, int flags);
int frd_reduce(struct frd_group *, void *data, size_t count, int type, int op, int root, int flags);
/* out = values of the ranks up to this one, combined; without this one's own if `exclusive` (rank 0 keeps its out) */
int frd_scan(struct frd_group *, const void *in, void *out, size_t count, int type, int op, int exclusive, int flags);
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

/* The same on one contiguous tensor of equal parts, `count` elements each: with fewer arguments to build. */
int frd_reduce_scatter_even(struct frd_group *, const void *in, void *out, size_t count, int type, int op,
                            int flags);
int frd_all_gather_even(struct frd_group *, const void *in, void *out, size_t count, int type, int flags);
int frd_all_to_all_even(struct frd_group *, const void *in, void *out, size_t count, int type, int flags);

/* Point-to-point: post, then test or wait.  `peer` -1 receives from any rank.  Tags below 0 are for parts of collectives.
 * Posting returns NULL for a send that is complete, a message, or a status below FRD_LAST_STATUS as a pointer.
 * Test and wait return the status, and the source shifted by 8 bits; unless that is FRD_PENDING the message is gone. */
#define FRD_LAST_STATUS 64
struct frd_message *frd_post_send(struct frd_group *, const void *data, size_t bytes, int type, int peer, int tag);
struct frd_message *frd_post_recv(struct frd_group *, void *data, size_t bytes, int type, int peer, int tag);
int frd_message_test(struct frd_group *, struct frd_message *);
int frd_message_wait(struct frd_group *, struct frd_message *, double timeout, int flags);
/* Post and wait; the group's timeout applies. */
int frd_send(struct frd_group *, const void *data, size_t bytes, int type, int peer, int tag, int flags);
int frd_recv(struct frd_group *, void *data, size_t bytes, int type, int peer, int tag, int flags);
void frd_message_cancel(struct frd_group *, struct frd_message *); /* gives it up: an error, if it has begun to move */

/* Calls of a queue that its thread runs unless another thread takes them first.  No group is involved. */
struct frd_tickets;
struct frd_tickets *frd_tickets_new(void); /* NULL: no memory, or no descriptor */
void frd_tickets_free(struct frd_tickets *);
void frd_tickets_post(struct frd_tickets *);
void frd_tickets_take(struct frd_tickets *);
void frd_tickets_close(struct frd_tickets *);
int frd_tickets_wait(struct frd_tickets *); /* 1: a ticket has not been taken for a while; 0: closed, and none is left */

/* Compression, of fp32: `type` is what a message is made of, bf16, fp16 or int8 (then a scale, amax / 127 in fp32, for
 * each `block` of values comes before the codes).  See codecs.h.  No group is involved. */
int frd_encode(int type, const float *x, float factor, float *residual, void *message, float *decoded, size_t count,
               size_t block);
int frd_decode(int type, const void *message, float *x, float factor, size_t count, size_t block);
/* For low-rank compression: the columns of a matrix, which lie one after the other, by the Gram-Schmidt process (one
 * that depends on those before it becomes zero); and x = p q^T of such columns.  The order of every sum is fixed, so
 * that processors of any kind get the same bits. */
void frd_orthonormalise(float *p, size_t rows, size_t rank);
void frd_outer(float *x, const float *p, const float *q, size_t rows, size_t columns, size_t rank);

#pragma GCC visibility pop
#endif
