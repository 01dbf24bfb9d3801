/* The interface of the C core: communication between the processes of a job.
 *
 * Plain C11 and Linux system calls; no torch, no MPI, no Python headers.  Every function may be called without the
 * interpreter lock.
 *
 *     arena      this process's shared memory, which every other process of the host maps once
 *     endpoint   this process's connection to the other processes of a job: their arenas, TCP, progress
 *     group      a communicator: a subset of the endpoint's processes, with its collectives and messages
 *
 * A group runs one collective at a time (the caller serializes the calls).  Collectives of different groups and
 * point-to-point operations of any group may run concurrently on any thread.
 */
#ifndef FARANDOLE_CORE_H
#define FARANDOLE_CORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#pragma GCC visibility push(default) /* the library exports only the declarations of this file */

#define FRD_ABI 15
#define FRD_MAX_RANKS 256 /* on one host */
#define FRD_NOTE_BYTES 160
#define FRD_KEY_BYTES 32
#define FRD_LARGEST_BLOCK 4096

/* An element type is (bytes per element << 8) | code; types without reductions have separate codes. */
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
    FRD_OK, FRD_DIED, FRD_LEFT, FRD_LATE, FRD_MISMATCH, FRD_COUNT_MISMATCH, FRD_INTERRUPTED, FRD_UNSUPPORTED,
    FRD_PENDING,
    FRD_CLOSED,     /* the connection to a rank of another host was closed */
    FRD_ELSEWHERE,  /* the group has failed on another host */
    FRD_PART_COUNT_MISMATCH, /* a message of a hierarchical collective and its receive have different counts */
    FRD_INVALID,    /* a root or peer outside the group */
    FRD_NO_MEMORY,
    FRD_SILENT      /* the host of a rank has not responded for FRD_SILENCE_S */
};
#define FRD_SILENCE_S 15.0
enum frd_vector_level { FRD_PLAIN, FRD_AVX2, FRD_AVX512 };

/* The call that a rank announces.  One cache line; ranks compare their calls before they use any data. */
struct frd_call {
    uint64_t index;      /* number of collectives that this rank has started in this group */
    uint32_t operation;  /* frd_operation */
    uint32_t type;       /* element type, as above */
    uint32_t op;         /* frd_reduce_op; 0 for none */
    int32_t root;        /* rank in the group, -1 for none; for point-to-point the peer */
    uint64_t count;      /* elements */
    uint64_t layout;     /* fingerprint of uneven counts; for point-to-point the tag */
    uint64_t stage;      /* 1 + offset of the staging slot in this rank's arena; 0: the payload follows the record */
    uint64_t source;     /* address, in this process, of an arena tensor that other ranks may read; 0: none */
    uint64_t target;     /* address, in this process, of an arena tensor that other ranks may write; 0: none */
};

/* The cause of a group's failure: written once, by the first rank that detects the failure, and read by all others. */
struct frd_failure {
    uint32_t status;     /* frd_status */
    int32_t culprit;     /* rank in the group */
    int32_t reporter;    /* likewise */
    int32_t missing;     /* FRD_LATE: the number of ranks that had not arrived */
    double timeout;      /* of the reporter's call, in seconds */
    struct frd_call culprit_call;  /* the last call that the culprit made */
    struct frd_call reporter_call;
    char note[FRD_NOTE_BYTES];     /* the reason that the culprit has written, if any */
};

struct frd_endpoint;
struct frd_group;
struct frd_message;  /* a pending point-to-point operation */

int frd_abi(void);
int frd_vector_level(void);          /* the highest level that this processor supports */
int frd_use_vector_level(int level); /* for tests: lower the level; returns the level in use */
/* out = a op b on the calling thread; out may be a or b */
int frd_combine(void *out, const void *a, const void *b, size_t count, int type, int op);
/* Functions of the interpreter with which a waiting main thread handles Ctrl-C. */
void frd_set_interrupts(int (*acquire)(void), void (*release)(int), int (*check)(void),
                        void (*fetch)(void **, void **, void **));
void frd_pending_interrupt(void **type, void **value, void **traceback);

/* ---- shared memory of this process ---- */

/* Map this process's arena, an empty memory file of `bytes` bytes; once per process (a forked child inherits none). */
int frd_arena_open(int descriptor, size_t bytes);
size_t frd_arena_bytes(void);          /* 0: this process has no arena */
void *frd_alloc(size_t bytes);         /* whole pages of this process's arena; NULL: the arena is full */
void frd_free(void *);                 /* frees the memory once no other process uses it */
size_t frd_arena_used(void);           /* bytes in use by tensors, groups and messages, or freed but not released yet */

/* ---- endpoints ---- */

/* Open the endpoint of process `rank` of a job with `ranks` processes.  Before the caller opens the first
 * group, it adds the arena of each process of this host and the address of each process of another host. */
struct frd_endpoint *frd_endpoint_open(int rank, int ranks);
uint64_t frd_endpoint_block(struct frd_endpoint *);   /* offset of the endpoint's block in this process's arena */
/* Add a process of this host, which may be this process.  `descriptor` refers to the process's arena; the caller closes
 * the descriptor.  `block` is the offset of the process's block in the arena.  Returns 0 or the errno of a failed
 * system call. */
int frd_endpoint_add(struct frd_endpoint *, int rank, int descriptor, size_t bytes, uint64_t block, int64_t pid);
void frd_endpoint_close(struct frd_endpoint *);       /* after all its groups */
void frd_endpoint_forked(struct frd_endpoint *);      /* in a forked child (one thread): closes inherited sockets */

/* Connect to processes of other hosts over TCP.  The endpoint takes ownership of `listener`, a listening socket.  `own`
 * is the source address of connections.  `key` is a secret of FRD_KEY_BYTES shared by the processes of the job.
 * Addresses are struct sockaddr. */
int frd_tcp_open(struct frd_endpoint *, int listener, const void *own, size_t own_bytes,
                 const unsigned char *key, double timeout);
int frd_tcp_add(struct frd_endpoint *, int rank, const void *address, size_t bytes);
int frd_tcp_start(struct frd_endpoint *);             /* after all addresses are added */

/* ---- groups ---- */

/* Reserve this process's part of a group in its arena. */
uint64_t frd_group_reserve(void);
void frd_group_unreserve(uint64_t block);             /* of a group that was not opened */
/* `members` contains ranks of the endpoint.  `blocks` contains the offset of the memory that each member on this host
 * has reserved.  `context` differs between any two groups that have two processes in common.  Failures do not break the
 * group with context 0. */
struct frd_group *frd_group_open(struct frd_endpoint *, uint64_t context, int rank, int ranks, const int *members,
                                 const uint64_t *blocks);
void frd_leave(struct frd_group *, const char *note);  /* notifies the other ranks; keeps the memory */
void frd_give_up(struct frd_group *);                  /* pending calls of this process return FRD_LEFT */
void frd_close(struct frd_group *);                    /* no call may be pending */
void frd_set_timeout(struct frd_group *, double seconds);      /* of messages and collectives */
void frd_set_call_timeout(struct frd_group *, double seconds); /* of the next collectives only */
/* Set a function that a waiting rank calls after 4 s, and then each time the wait has doubled.  The function is called
 * without the interpreter lock. */
void frd_set_stall_warning(struct frd_group *, void (*)(double waited, double timeout));
void frd_get_failure(struct frd_group *, struct frd_failure *);
void frd_get_call(struct frd_group *, int local_rank, struct frd_call *);
/* Store the last message call of a rank; return whether the rank has waited in that call for at least a second. */
bool frd_get_wait(struct frd_group *, int local_rank, struct frd_call *);
void frd_connect(struct frd_group *, int rank);        /* open the connection before the first send */
double frd_silence(struct frd_group *, int rank);      /* seconds since its host last responded; -1: unknown */
void frd_break(struct frd_group *, int culprit);       /* apply a failure found on another host to this host */
void frd_tell_broken(struct frd_group *);              /* propagate the failure to all hosts of the group */
/* Declare a user's call that consists of several collectives on this host.  The ranks agree on the call first, and
 * errors name it until frd_undeclare is called. */
int frd_declare(struct frd_group *, const struct frd_call *, int flags);
void frd_undeclare(struct frd_group *);

/* Collectives among the ranks of a group on this host.  Flags: FRD_BACKGROUND sleeps early while waiting,
 * FRD_MAIN_THREAD handles signals while waiting, FRD_TRY makes frd_message_wait return FRD_PENDING at the timeout
 * without breaking the group.  Counts are in elements. */
enum frd_flags { FRD_BACKGROUND = 1, FRD_MAIN_THREAD = 2, FRD_TRY = 4 };
int frd_barrier(struct frd_group *, int flags);
int frd_all_reduce(struct frd_group *, void *data, size_t count, int type, int op, int flags);
int frd_all_reduce_to(struct frd_group *, const void *in, void *out, size_t count, int type, int op, int flags);
int frd_reduce(struct frd_group *, void *data, size_t count, int type, int op, int root, int flags);
/* out = reduction of the values of the ranks from 0 to this rank; `exclusive` excludes this rank, so rank 0's out is
 * unchanged */
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

/* The same collectives for one contiguous tensor with parts of `count` elements; fewer arguments must be prepared. */
int frd_reduce_scatter_even(struct frd_group *, const void *in, void *out, size_t count, int type, int op,
                            int flags);
int frd_all_gather_even(struct frd_group *, const void *in, void *out, size_t count, int type, int flags);
int frd_all_to_all_even(struct frd_group *, const void *in, void *out, size_t count, int type, int flags);

/* Point-to-point: post, then test or wait.  `peer` -1 receives from any rank.  Tags below 0 are reserved for
 * collectives.  Posting returns a message, or NULL if a send is already complete, or, on failure, a status below
 * FRD_LAST_STATUS as a pointer.  Test and wait return status | source << 8; unless the status is FRD_PENDING, they free
 * the message. */
#define FRD_LAST_STATUS 64
struct frd_message *frd_post_send(struct frd_group *, const void *data, size_t bytes, int type, int peer, int tag);
struct frd_message *frd_post_recv(struct frd_group *, void *data, size_t bytes, int type, int peer, int tag);
int frd_message_test(struct frd_group *, struct frd_message *);
int frd_message_wait(struct frd_group *, struct frd_message *, double timeout, int flags);
/* Post and wait; the group's timeout applies. */
int frd_send(struct frd_group *, const void *data, size_t bytes, int type, int peer, int tag, int flags);
int frd_recv(struct frd_group *, void *data, size_t bytes, int type, int peer, int tag, int flags);
void frd_message_cancel(struct frd_group *, struct frd_message *); /* breaks the group if the transfer has started */

/* Tickets of a work queue's calls.  The queue's thread runs the calls that no other thread takes.  Independent of
 * groups. */
struct frd_tickets;
struct frd_tickets *frd_tickets_new(void); /* NULL: out of memory or descriptors */
void frd_tickets_free(struct frd_tickets *);
void frd_tickets_post(struct frd_tickets *);
void frd_tickets_take(struct frd_tickets *);
void frd_tickets_close(struct frd_tickets *);
int frd_tickets_wait(struct frd_tickets *); /* 1: a ticket has been open for a while; 0: closed, no ticket is open */

/* Compression of fp32.  `type` is the element type of a message: bf16, fp16 or int8.  An int8 message starts with
 * one fp32 scale, amax / 127, for each block of `block` values; the codes follow.  See codecs.h.  Independent of
 * groups. */
int frd_encode(int type, const float *x, float factor, float *residual, void *message, float *decoded, size_t count,
               size_t block);
int frd_decode(int type, const void *message, float *x, float factor, size_t count, size_t block);
/* For low-rank compression: Gram-Schmidt orthonormalization of the columns of a column-major matrix (a column that
 * depends on earlier ones becomes zero), and x = p q^T for column-major p and q.  The order of every sum is fixed, so
 * all processors get the same bits. */
void frd_orthonormalize(float *p, size_t rows, size_t rank);
void frd_outer(float *x, const float *p, const float *q, size_t rows, size_t columns, size_t rank);

/* Generation: the product out = x weight^T + bias, where `type` is the type of the packed weight; normalization,
 * activation and rotation of fp32 or bf16 values; and attention of single queries over stored blocks of keys and values
 * (inference.h).  Each row of a result depends only on its own inputs, and its sums are computed in a fixed order.  For
 * int8 weights, each row of x is rounded to int16 with its own factor.  Normalization and rotation may be in place. */
enum { FRD_WEIGHTS_F32, FRD_WEIGHTS_BF16, FRD_WEIGHTS_INT8 };
size_t frd_packed_size(size_t outputs, size_t inputs, int type);
void frd_pack(void *packed, const void *weight, size_t outputs, size_t inputs, int type);
int frd_linear(float *out, const float *x, const void *packed, const float *scales, const float *bias, size_t rows,
               size_t inputs, size_t outputs, int type, int threads);
/* x / sqrt(mean(x^2) + epsilon) * weight */
void frd_rms_norm(void *out, const void *x, const void *weight, size_t rows, size_t width, float epsilon, int is_bf16);
/* silu(gate) * up; each row of x contains `width` values of gate, then `width` values of up */
void frd_swiglu(void *out, const void *x, size_t rows, size_t width, int is_bf16);
/* Rotary positions, which pair value i with value i + width / 2. */
void frd_rotate(void *out, const void *x, const void *cosine, const void *sine, size_t rows, size_t heads, size_t width,
                int64_t row_stride, int64_t head_stride, int is_bf16);
int frd_attend(float *out, const float *query, const void *keys, const void *values, const int32_t *table,
               const int64_t *positions, size_t queries, size_t heads, size_t kv_heads, size_t width, size_t value_width,
               size_t block_length, size_t table_width, int64_t query_stride, int64_t head_stride, int64_t window,
               float scale, int is_bf16, int threads);
/* Stores a key and a value per row and head.  `strides`: of `key` per row and per head, then of `value`. */
void frd_store(void *keys, void *values, const void *key, const void *value, const int32_t *table,
               const int64_t *positions, size_t rows, size_t kv_heads, size_t width, size_t value_width,
               size_t block_length, size_t table_width, const int64_t strides[4], int is_bf16);

/* A decoder with RMS normalization, rotary positions and a gated feed-forward network.  All values except packed weights
 * and the stored keys and values are fp32. */
struct frd_matrix {
    const void *packed;         /* see frd_pack */
    const float *scales, *bias; /* (outputs) each: the scales of int8 weights, and the bias or NULL */
    int type;
};
struct frd_layer {
    const float *norm_attention, *norm_feed_forward; /* (width) */
    const float *norm_query, *norm_key;              /* (head width), or NULL */
    struct frd_matrix qkv, out, gate_up, down;
    void *keys, *values; /* see frd_attend */
    int64_t window;      /* number of most recent positions that a query attends to; 0: all */
};
struct frd_decoder {
    const struct frd_layer *layers;
    size_t layer_count, width, heads, kv_heads, head_width, inner, vocabulary;
    const float *norm; /* (width) */
    struct frd_matrix head;
    const float *cosine, *sine; /* (positions, head width / 2) */
    float epsilon, scale;
    int is_bf16; /* 1: stored keys and values are bf16; 0: fp32 */
};
/* The tokens of a step, one per row. */
struct frd_step {
    float *hidden;            /* (rows, width), the embeddings; overwritten */
    const int64_t *positions; /* (rows) */
    const int32_t *table;     /* (rows, table width), the blocks of each row's sequence */
    const int64_t *selected;  /* the rows whose logits are computed */
    float *logits;            /* (selected rows, vocabulary) */
    void *workspace;          /* frd_decoder_bytes(rows) bytes */
    size_t rows, selected_count, table_width, block_length;
};
size_t frd_decoder_bytes(const struct frd_decoder *, size_t rows);
/* Stores the keys and values of all rows, and computes the logits of the selected rows. */
int frd_decoder_step(const struct frd_decoder *, const struct frd_step *, int threads);

#pragma GCC visibility pop
#endif
