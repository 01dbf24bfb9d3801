/* Point-to-point messages between the processes of an endpoint, on one host or on several.
 *
 *     progress.c     the caller's side: post, test, wait, cancel; the progress thread
 *     matching.c     matching of messages and receives
 *     shared_memory.c   to a process of this host: a ring of bytes, and direct copies between user buffers
 *     tcp.c, handshake.c   to a process of another host: a TCP connection in each direction
 *
 * To each process there is a stream of bytes in each direction, with one writer and one reader.  A message is a 64-byte
 * header and its payload.  On one host the payload of a large message follows later (rendezvous):
 *
 *     sender   -> receiver   OFFER    its size, tag and number; the sender keeps the payload
 *     receiver -> sender     CLEAR    the receive is posted: send the payload of this number
 *     sender   -> receiver   PAYLOAD  its number, and the payload
 *
 * A payload is therefore copied directly to its receive and never delays later messages of the stream.  If the payload
 * is in the sender's arena, the receiver copies it from the arena and sends DONE instead of CLEAR.
 */
#ifndef FARANDOLE_MESSAGES_H
#define FARANDOLE_MESSAGES_H

#include "internal.h"

#define HEADER 64
#define EAGER_BYTES ((size_t)1 << 15)      /* up to here a payload follows its header; measured, see docs/benchmarks/results.md */
#define TURN_BYTES ((size_t)4 << 20)       /* bytes of one stream after which the other streams progress */
#define UNEXPECTED_BYTES ((size_t)4 << 20) /* unexpected payloads of one sender, while no receive waits for a later message of it */

#define LARGEST_MESSAGE ((uint64_t)1 << 48)

enum header_kind { EAGER, OFFER, CLEAR, PAYLOAD, DONE, GROUP_LEFT, GROUP_BROKEN };

struct header {
    uint64_t bytes;
    uint64_t number;             /* of an offered payload: unique among those of its sender */
    uint64_t place;              /* OFFER: 1 + offset of the payload in the sender's arena; 0: it is not there */
    uint64_t context;
    uint32_t kind;
    int32_t tag;
    uint32_t type;
    int32_t source;              /* rank of the sender in the group; GROUP_BROKEN: the culprit */
    char padding[HEADER - 48];
};

struct frd_message {
    struct frd_message *next;    /* in the list that it is in */
    struct frd_group *group;
    bool sends, started, detached; /* detached: the caller does not wait for it, and it owns its data */
    int peer, tag, type, source;
    _Atomic int status;
    char *data;
    size_t bytes, moved;
    size_t header_moved;
    struct header header;        /* of a send; of a receive that waits for a PAYLOAD */
    struct peer *from;           /* of a receive under way: the sender */
    uint64_t number;             /* of a receive: the order in which they were posted in the group */
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
    char data[];                 /* of an offer: none */
};

/* What comes from one process: the message under way. */
struct incoming {
    bool under_way;
    bool blocked;                /* its head waits for a receive */
    bool refused;                /* it had bytes that are no message */
    struct header header;
    size_t header_moved, moved;
    struct frd_message *receive; /* where the payload goes; if NULL, to `unexpected`, or nowhere if that is NULL, too */
    struct unexpected *unexpected;
    size_t buffered;             /* bytes of unexpected payloads that no receive has claimed */
};

struct ring;
struct connection;

/* How a stream moves bytes: how many moved.  A stream that has ended moves none. */
struct transport {
    size_t (*put)(struct peer *, const char *data, size_t bytes, bool more);
    size_t (*take)(struct peer *, char *data, size_t bytes);
    void (*moved_out)(struct peer *);  /* after `put` */
    void (*moved_in)(struct peer *);   /* after `take` */
    void (*again)(struct peer *);      /* it was left before it had to be: have it looked at again */
    void (*refuse)(struct peer *);     /* its bytes are no message: take no more of them */
    bool offers;                       /* large payloads wait for their receive */
    bool (*has_ended)(const struct peer *, bool sends); /* in one direction: to the peer, or from it */
};
extern const struct transport over_shared_memory, over_tcp;

/* Another process of the job, or this one. */
struct peer {
    struct frd_endpoint *endpoint;
    int rank;                    /* in the endpoint */
    int local;                   /* its number among the processes of this host, -1 if it is on another */
    const struct transport *transport;
    struct queue sends;          /* oldest first */
    struct incoming in;
    struct queue offered;        /* sends whose OFFER has gone out */
    /* on this host */
    char *arena;
    size_t arena_bytes;
    struct process_block *block;
    uint64_t nonce;              /* of its block */
    uint64_t arena_there;        /* address of its arena in its own process */
    int process_descriptor;
    struct ring *outward, *inward; /* NULL until used */
    /* on another host; NULL until its address is known */
    struct connection *connection;
};

/* What a process shows the other processes of an endpoint, in its arena. */
struct process_block {
    struct {
        _Atomic uint32_t events;     /* counts what others did that concerns this process's messages */
        _Atomic uint32_t sleepers;   /* threads asleep until it changes */
        _Atomic uint32_t attended;   /* threads that wait and look at it themselves */
        _Atomic uint32_t thread_sleeps; /* the progress thread sleeps until it changes */
        _Atomic uint64_t ready[FRD_MAX_RANKS / 64]; /* a bit per process: something about its streams has changed */
    } ALIGNED bell;
    struct {
        _Atomic uint64_t nonce;      /* another one whenever this memory is used for something else */
        _Atomic uint32_t state;      /* rank_state */
        uint64_t arena;              /* address of the arena in its own process */
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
    uint64_t offers;             /* how many this process has made */
    pthread_t thread;            /* moves data while no thread waits */
    bool thread_runs, stopping;
    struct queue early;          /* messages of groups that this process has not opened yet */
    uint64_t *closed;            /* contexts of groups that it has closed */
    int closed_count;
    _Atomic int in_background;   /* messages that the thread must see to; changed under the lock */
    bool thread_deep_asleep;     /* it must be woken when a message is posted */
    _Atomic uint32_t naps;       /* the futex on which it sleeps between two checks */
    _Atomic int crowded;         /* > 0: another thread wants this core, so do not spin; waiting threads share this guess */
    struct tcp_state *tcp;       /* NULL if the job has one host */
};

/* matching.c; the lock is held */
bool push(struct peer *);                      /* send what can be sent; false if nothing moved */
bool pull(struct peer *);                      /* receive what there is a place for */
void post_receive(struct frd_message *);
void post_send(struct frd_message *);
void finish(struct frd_message *, int status);
void give_up(struct frd_message *);            /* removes it from all lists, and frees it */
void enqueue(struct queue *, struct frd_message *);
void dequeue(struct queue *, struct frd_message *);
struct frd_call call_of_message(const struct frd_message *);
void buffer_unexpected(struct frd_message *);  /* let senders proceed that may send the message of this receive later */
void claim_early(struct frd_group *);          /* when a group is opened */
void clear_unexpected(struct frd_group *);     /* when it is closed */
void free_messages(struct frd_endpoint *);     /* those that are left when all groups are closed */
void send_control(struct peer *, struct header); /* a header without a payload */

/* shared_memory.c */
void ring_bell(struct peer *);                 /* something about the streams between it and this process has changed */
void ring_own_bell(struct frd_endpoint *);     /* threads of this process look again */
void free_rings(struct frd_endpoint *);

/* tcp.c */
bool tcp_is_in_use(const struct peer *);       /* has there been a connection, and can more be sent? */
bool tcp_has_been_cut(const struct peer *);    /* it had opened a connection, which has ended */
void tcp_stop(struct frd_endpoint *);
void tcp_close_sockets(struct frd_endpoint *); /* and nothing else */
void tcp_wake(struct frd_endpoint *);
void tcp_wait(struct frd_endpoint *, double seconds); /* the progress thread: until events, and handle them */

/* progress.c */
bool progress(struct frd_endpoint *);          /* the lock is held: moves what has been announced */
void progress_stop(struct frd_endpoint *);
void wake_thread(struct frd_endpoint *);

#endif
