/* Point-to-point messages between the ranks of a group, on one host or on several.
 *
 *     delivery.c   what the caller sees: post, test, wait, release; who moves data while nobody waits
 *     mailbox.c    which message goes into which receive
 *     ring.c       the way to a rank of this host: a ring of bytes in the shared segment
 *     wire.c       the way to a rank of another host: a TCP connection in each direction
 *
 * Ranks are numbered as in the whole group, over all its hosts.  A way, ring or wire, is a stream of bytes
 * with one writer and one reader.  A message is a 64-byte envelope and its payload.
 */
#ifndef FARANDOLE_MAIL_H
#define FARANDOLE_MAIL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "core.h"

#define ENVELOPE 64

struct envelope {
    uint64_t bytes;
    int32_t tag;
    uint32_t type;
    char padding[ENVELOPE - 16];
};

struct frd_message {
    struct frd_message *next;
    bool sends, started, in_background;
    int peer, tag, type, source, status;
    char *data;
    size_t bytes, moved;
    struct envelope envelope; /* of a send */
    size_t envelope_moved;
    double inspected; /* when somebody last looked whether its other end lives */
};

/* A message that arrived before its receive. */
struct stray {
    struct stray *next;
    struct frd_message *claimed_by;
    struct envelope envelope;
    bool complete;
    char data[];
};

/* What comes from one rank: the message under way, and those put aside (oldest first).  A message that was
 * given up half-way leaves its stream useless: nobody could tell its rest from the next one.  Its group is
 * broken, and the end that gave up (`torn`, `sends_torn`) moves nothing there any more. */
struct inbox {
    bool torn;
    bool under_way;
    struct envelope envelope;
    size_t envelope_moved;
    size_t moved;
    struct frd_message *receive; /* where it goes; if NULL, into the stray */
    struct stray *stray, *strays;
};

struct ring;
struct wire;
struct wires;

/* Another rank, and the way to it: a pair of rings if it is on this host, else a wire. */
struct peer {
    int rank;
    int local;                   /* its number among the ranks of this host, -1 if it is on another */
    struct ring *outward, *inward;
    struct wire *wire;           /* NULL until its address is known */
    struct frd_message *sends;   /* oldest first */
    bool sends_torn;
    struct inbox inbox;
};

struct mail {
    int rank, ranks;             /* in the whole group */
    struct peer *peers;
    struct frd_message *receives;
    pthread_mutex_t lock;        /* held by whoever moves data */
    pthread_cond_t work;
    pthread_t thread;            /* sees to the rings while nobody waits */
    bool thread_runs, stopping;
    int in_background;           /* messages that the thread must see to */
    struct wires *wires;         /* NULL if the group has one host */
};

/* mailbox.c; the lock is held */
bool push(struct frd_group *, struct peer *);  /* send what can be sent; false if nothing moved */
bool pull(struct frd_group *, struct peer *);  /* receive what there is a place for */
void claim_stray(struct frd_group *, struct frd_message *);
bool could_take(const struct frd_message *, int source);
void finish(struct frd_group *, struct frd_message *, int status);
void unlink_message(struct frd_message **list, struct frd_message *);
void append_message(struct frd_message **list, struct frd_message *);
struct frd_call call_of_message(const struct frd_group *, const struct frd_message *);

/* ring.c: how many bytes moved.  Pieces but the last of a message are multiples of 64. */
size_t ring_put(struct ring *, const char *data, size_t bytes);
size_t ring_take(struct ring *, char *data, size_t bytes);
void ring_doorbell(struct frd_group *, int local);

/* wire.c: how many bytes moved; a wire that has ended moves none */
size_t wire_put(struct frd_group *, struct peer *, const char *data, size_t bytes, bool more);
size_t wire_take(struct frd_group *, struct peer *, char *data, size_t bytes);
bool wire_has_ended(const struct peer *);
void wires_remind(struct frd_group *, const struct peer *); /* it was left before it had to be */
void wires_stop(struct frd_group *);

/* delivery.c */
int mail_open(struct frd_group *, int rank, int ranks, const int *local_of); /* -1: no memory */
void mail_close(struct frd_group *);

#endif
