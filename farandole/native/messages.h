/* Point-to-point messages between the processes of an endpoint, on one host or on several.
 *
 *     progress.c     what the caller sees: post, test, wait, cancel; who moves data while nobody waits
 *     matching.c     which message goes into which receive
 *     shared_memory.c   to a process of this host: a ring of bytes, and copies straight from memory to memory
 *     tcp.c          to a process of another host: a TCP connection in each direction
 *
 * To each process there is a stream of bytes in each direction, with one writer and one reader.  A message is a 64-byte
 * header and its payload.  The payload of a large message on one host does not go through the stream: the header says
 * where it is, and the receiver copies it (rendezvous).
 */
#ifndef FARANDOLE_MESSAGES_H
#define FARANDOLE_MESSAGES_H

#include "internal.h"

#define HEADER 64
#define EAGER_BYTES ((size_t)1 << 14)      /* up to here a payload follows its header, whatever else is possible */
#define TURN_BYTES ((size_t)4 << 20)       /* after so many bytes of one stream the others have their turn */
#define UNEXPECTED_BYTES ((size_t)4 << 20) /* of one process, put aside though nobody waits for what is behind them */

enum header_kind { EAGER, RENDEZVOUS, GROUP_LEFT, GROUP_BROKEN };

struct header {
    uint64_t bytes;
    uint64_t address;            /* RENDEZVOUS: of the payload, in the sender's process */
    uint64_t transfer;           /* RENDEZVOUS: 1 + offset of its record in the sender's arena */
    uint64_t context;
    uint32_t kind;
    int32_t tag;
    uint32_t type;
    int32_t source;              /* rank of the sender in the group; GROUP_BROKEN: the culprit */
    char padding[HEADER - 48];
};

/* A rendezvous, in the sender's arena.  Chunks are claimed by whoever copies: the receiver, and the sender while it
 * waits.  States: the sender offers, the receiver opens, the receiver closes as its last access; then the record is the
 * sender's again.  The sender may withdraw before that; then the payload is not valid and the record is not used again. */
enum transfer_state { OFFERED, OPEN, WITHDRAWN, CLOSED };
struct transfer {
    _Atomic uint32_t state;
    uint32_t failed;             /* written before CLOSED */
    uint64_t target;             /* address in the receiver's process; written before OPEN */
    _Atomic uint64_t claimed;    /* chunks */
    _Atomic uint64_t copied;     /* chunks */
} ALIGNED;

struct frd_message {
    struct frd_message *next;    /* in the list that it is in */
    struct frd_group *group;
    bool sends, started, detached; /* detached: nobody waits for it, it owns its data */
    int peer, tag, type, source;
    _Atomic int status;
    char *data;
    size_t bytes, moved;
    size_t header_moved;
    struct header header;        /* of a send */
    struct transfer *transfer;   /* of a rendezvous under way */
    bool pinned;                 /* a thread copies chunks of it without the lock, and ends it itself */
    struct peer *from;           /* of a receive under way: the sender */
    uint64_t address;            /* likewise: of the payload, in its process */
    uint64_t number;             /* of a receive: the order in which they were posted in the group */
    bool in_background;          /* counted as work for the progress thread */
    double inspected;            /* when somebody last looked whether its other end lives */
};

/* A message that arrived before its receive. */
struct unexpected {
    struct unexpected *next;
    struct header header;
    struct peer *from;
    struct frd_message *claimed_by;
    bool complete;
    char data[];
};

/* What comes from one process: the message under way. */
struct incoming {
    bool under_way;
    bool blocked;                /* its head waits for a receive */
    struct header header;
    size_t header_moved, moved;
    struct frd_message *receive; /* where the payload goes; if NULL, to `unexpected`, or nowhere if that is NULL, too */
    struct unexpected *unexpected;
    size_t put_aside;            /* bytes of unexpected payloads that no receive has claimed */
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
    struct queue transfers;      /* sends whose header has gone out, to be copied by the receiver */
    /* on this host */
    char *arena;
    size_t arena_bytes;
    struct process_block *block;
    uint64_t nonce;              /* of its block */
    uint64_t arena_there;        /* address of its arena in its own process */
    int64_t pid;
    int process_descriptor;
    bool readable;
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
    _Atomic uint8_t reads[FRD_MAX_RANKS];    /* may this process read that one's memory? */
};

#define CONTEXTS 64

struct frd_endpoint {
    struct frd_endpoint *next;   /* among closing endpoints */
    int rank, ranks, locals;
    struct peer *peers;
    int *local_peers;            /* local number -> rank */
    struct process_block *block;
    struct frd_group *groups[CONTEXTS]; /* lists, by context */
    pthread_mutex_t lock;        /* held by whoever moves data; group lists, too */
    struct transfer **free_transfers;
    int free_transfer_count;
    void **transfer_blocks;      /* in the arena */
    int transfer_block_count;
    pthread_t thread;            /* moves data while nobody waits */
    bool thread_runs, stopping;
    struct queue early;          /* messages of groups that this process has not opened yet */
    uint64_t *closed;            /* contexts of groups that it has closed */
    int closed_count;
    struct queue copying;        /* receives that copy from another process's memory */
    int in_background;           /* messages that the thread must see to */
    bool thread_deep_asleep;     /* it must be woken when a message is posted */
    _Atomic uint32_t naps;       /* the word on which it naps */
    int crowded;                 /* > 0: somebody else wants this core, so do not spin */
    struct tcp_state *tcp;       /* NULL if the job has one host */
};

/* matching.c; the lock is held */
bool push(struct peer *);                      /* send what can be sent; false if nothing moved */
bool pull(struct peer *);                      /* receive what there is a place for */
void post_receive(struct frd_message *);
void post_send(struct frd_message *);
void finish(struct frd_message *, int status);
void give_up(struct frd_message *);            /* nobody waits for it any more: takes it out of all lists, and frees it */
void enqueue(struct queue *, struct frd_message *);
void dequeue(struct queue *, struct frd_message *);
struct frd_call call_of_message(const struct frd_message *);
void buffer_unexpected(struct frd_message *);  /* let the senders go on that may yet send what this receive waits for */
void claim_early(struct frd_group *);          /* when a group is opened */
void clear_unexpected(struct frd_group *);     /* when it is closed */
void free_early(struct frd_endpoint *);
void send_control(struct frd_group *, int rank, enum header_kind, int culprit);

/* shared_memory.c */
void ring_bell(struct peer *);                 /* something about the streams between it and this process has changed */
void ring_own_bell(struct frd_endpoint *);     /* threads of this process look again */
bool offer_transfer(struct frd_message *);     /* a send: make its record; false: send it through the stream */
void open_transfer(struct frd_message *, struct peer *from, const struct header *);
bool can_copy(const struct frd_message *);     /* is there a chunk of its transfer that nobody has claimed? */
bool copy_chunk(struct frd_message *);         /* the message is pinned, or the lock is held; false: none left */
bool has_ended(const struct frd_message *);    /* is its transfer copied (a receive) or closed (a send)? */
void end_transfer(struct frd_message *);
bool fetch(struct peer *from, const struct header *, char *data); /* the payload of a message without a receive, at once */
void abort_transfer(struct frd_message *);
void free_rings(struct frd_endpoint *);

/* tcp.c */
bool tcp_is_in_use(const struct peer *);       /* has there been a connection, and can more be sent? */
void tcp_stop(struct frd_endpoint *);
void tcp_wake(struct frd_endpoint *);
void tcp_wait(struct frd_endpoint *, double seconds); /* the progress thread: until events, and handle them */

/* progress.c */
bool progress(struct frd_endpoint *);          /* the lock is held: moves what has been announced */
void progress_stop(struct frd_endpoint *);
void wake_thread(struct frd_endpoint *);

#endif
