/* Point-to-point messages between the processes of an endpoint, on one host or on several.
 *
 *     progress.c     the caller's side: post, test, wait, cancel; the progress thread
 *     matching.c     matching of messages and receives
 *     shared_memory.c   to a process of this host: a ring of bytes
 *     tcp.c, handshake.c   to a process of another host: a TCP connection in each direction
 *
 * Between two processes there is a stream of bytes in each direction, with one writer and one reader.  A message is a
 * 64-byte header and its payload.  On one host the payload of a large message follows later (rendezvous):
 *
 *     sender   -> receiver   OFFER    the size, tag and number of the message; the sender keeps the payload
 *     receiver -> sender     CLEAR    the receive is posted: send the payload with this number
 *     sender   -> receiver   PAYLOAD  the number and the payload
 *
 * A payload is therefore copied directly to the buffer of its receive and never delays later messages of the stream.
 * If the payload is in the sender's arena, the receiver copies it from the arena and sends DONE instead of CLEAR.
 */
#ifndef FARANDOLE_MESSAGES_H
#define FARANDOLE_MESSAGES_H

#include "internal.h"

#define HEADER 64
/* A payload of up to this size follows its header.  The limit was measured: see docs/benchmarks/results.md. */
#define EAGER_BYTES ((size_t)1 << 15)
#define TURN_BYTES ((size_t)4 << 20)       /* bytes of one stream after which the other streams progress */
/* The limit for buffered payloads of one sender, unless a posted receive may match a later message of the sender. */
#define UNEXPECTED_BYTES ((size_t)4 << 20)

#define LARGEST_MESSAGE ((uint64_t)1 << 48)

enum header_kind { EAGER, OFFER, CLEAR, PAYLOAD, DONE, GROUP_LEFT, GROUP_BROKEN };

struct header {
    uint64_t bytes;
    uint64_t number;             /* of an offered payload: unique among the offers of its sender */
    uint64_t place;              /* OFFER: 1 + offset of the payload in the sender's arena; 0: not in the arena */
    uint64_t context;
    uint32_t kind;
    int32_t tag;
    uint32_t type;
    int32_t source;              /* rank of the sender in the group; GROUP_BROKEN: the culprit */
    char padding[HEADER - 48];
};

struct frd_message {
    struct frd_message *next;    /* in its queue */
    struct frd_group *group;
    bool sends, started, detached; /* detached: no caller waits for the message, which owns its data */
    int peer, tag, type, source;
    _Atomic int status;
    char *data;
    size_t bytes, moved;
    size_t header_moved;
    struct header header;        /* of a send, or of a receive that waits for a PAYLOAD */
    struct peer *from;           /* of a started receive: the sender */
    uint64_t number;             /* of a receive: its position in the order of posting in the group */
    bool in_background;          /* counted as work for the progress thread */
    double inspected;            /* when the liveness of its peer was last checked */
};

/* A message that arrived before its receive was posted. */
struct unexpected {
    struct unexpected *next;
    struct header header;
    struct peer *from;
    struct frd_message *claimed_by;
    bool complete;
    char data[];                 /* empty for an offer */
};

/* The message that is arriving from one process. */
struct incoming {
    bool under_way;
    bool blocked;                /* the message at the head of the stream waits for a receive */
    bool refused;                /* the stream contained an invalid header */
    struct header header;
    size_t header_moved, moved;
    struct frd_message *receive; /* the destination of the payload, if not NULL */
    struct unexpected *unexpected; /* else the destination; if both are NULL, the payload is discarded */
    size_t buffered;             /* bytes of buffered payloads */
};

struct ring;
struct connection;

/* The functions of a stream.  `put` and `take` return the number of bytes moved, which is 0 after the stream's end. */
struct transport {
    size_t (*put)(struct peer *, const char *data, size_t bytes, bool more);
    size_t (*take)(struct peer *, char *data, size_t bytes);
    void (*moved_out)(struct peer *);  /* after `put` */
    void (*moved_in)(struct peer *);   /* after `take` */
    void (*again)(struct peer *);      /* schedule another check of a stream that could still move bytes */
    void (*refuse)(struct peer *);     /* stop reading a stream with an invalid header */
    bool offers;                       /* large payloads use rendezvous */
    bool (*has_ended)(const struct peer *, bool sends); /* in one direction: to the peer or from the peer */
};
extern const struct transport over_shared_memory, over_tcp;

/* Another process of the job, or this one. */
struct peer {
    struct frd_endpoint *endpoint;
    int rank;                    /* in the endpoint */
    int local;                   /* its number among the processes of this host, -1 if it is on another host */
    const struct transport *transport;
    struct queue sends;          /* oldest first */
    struct incoming in;
    struct queue offered;        /* sends whose OFFER was sent */
    /* on this host */
    char *arena;
    size_t arena_bytes;
    struct process_block *block;
    uint64_t nonce;              /* of its block */
    uint64_t arena_there;        /* address of the arena in that process */
    int process_descriptor;
    struct ring *outward, *inward; /* NULL until used */
    /* on another host; NULL until its address is known */
    struct connection *connection;
};

/* The part of a process's arena that the other processes of an endpoint read. */
struct process_block {
    struct {
        _Atomic uint32_t events;     /* number of events that concern this process's messages */
        _Atomic uint32_t sleepers;   /* threads asleep until `events` changes */
        _Atomic uint32_t attended;   /* waiting threads, which check `events` themselves */
        _Atomic uint32_t thread_sleeps; /* the progress thread sleeps until `events` changes */
        _Atomic uint64_t ready[FRD_MAX_RANKS / 64]; /* one bit per process: its streams have changed */
    } ALIGNED bell;
    struct {
        _Atomic uint64_t nonce;      /* changes when this memory is reused */
        _Atomic uint32_t state;      /* rank_state */
        uint64_t arena;              /* address of the arena in this process */
    } ALIGNED identity;
    _Atomic uint64_t ring_to[FRD_MAX_RANKS]; /* 1 + offset of the ring to each process of the host; 0: none yet */
};

#define CONTEXTS 64

struct frd_endpoint {
    struct frd_endpoint *next;   /* among closing endpoints */
    int rank, ranks, locals;
    struct peer *peers;
    int *local_peers;            /* local number -> rank */
    struct process_block *block;
    struct frd_group *groups[CONTEXTS]; /* lists, by context */
    pthread_mutex_t lock;        /* protects all streams, messages and group lists */
    uint64_t offers;             /* number of offers that this process has made */
    pthread_t thread;            /* moves data while no thread waits */
    bool thread_runs, stopping;
    struct queue early;          /* messages of groups that this process has not opened yet */
    uint64_t *closed;            /* contexts of groups that this process has closed */
    int closed_count;
    _Atomic int in_background;   /* messages that the thread must progress; changed under the lock */
    bool thread_deep_asleep;     /* posting a message must wake the thread */
    _Atomic uint32_t naps;       /* futex on which the thread sleeps between two checks */
    _Atomic int crowded;         /* > 0: another thread wants this core, so do not spin; shared by waiting threads */
    struct tcp_state *tcp;       /* NULL if the job has one host */
};

/* matching.c; the lock is held */
bool push(struct peer *);                      /* send as much as possible; false if no byte moved */
bool pull(struct peer *);                      /* receive as much as possible; false if no byte moved */
void post_receive(struct frd_message *);
void post_send(struct frd_message *);
void finish(struct frd_message *, int status);
void give_up(struct frd_message *);            /* remove the message from all queues and free it */
void enqueue(struct queue *, struct frd_message *);
void dequeue(struct queue *, struct frd_message *);
struct frd_call call_of_message(const struct frd_message *);
void buffer_unexpected(struct frd_message *);  /* request and buffer payloads that possible senders have offered */
void claim_early(struct frd_group *);          /* when a group is opened */
void clear_unexpected(struct frd_group *);     /* when it is closed */
void free_messages(struct frd_endpoint *);     /* after all groups are closed */
void send_control(struct peer *, struct header); /* a header without a payload */

/* shared_memory.c */
void ring_bell(struct peer *);                 /* notify a peer that a stream between it and this process has changed */
void ring_own_bell(struct frd_endpoint *);     /* wake the waiting threads of this process */
void free_rings(struct frd_endpoint *);

/* tcp.c */
bool tcp_is_in_use(const struct peer *);       /* whether a connection was opened and can still send */
bool tcp_has_been_cut(const struct peer *);    /* whether a connection that the peer opened has ended */
void tcp_stop(struct frd_endpoint *);
void tcp_close_sockets(struct frd_endpoint *); /* close the sockets only */
void tcp_wake(struct frd_endpoint *);
void tcp_wait(struct frd_endpoint *, double seconds); /* the progress thread waits for events and handles them */

/* progress.c */
bool progress(struct frd_endpoint *);          /* the lock is held: progress the streams that have changed */
void progress_stop(struct frd_endpoint *);
void wake_thread(struct frd_endpoint *);

#endif
