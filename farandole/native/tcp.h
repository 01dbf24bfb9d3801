/* The transport to processes of other hosts.
 *
 *     handshake.c    opening connections; accepting only connections from processes of the job
 *     tcp.c          moving bytes; the progress thread's events
 */
#ifndef FARANDOLE_TCP_H
#define FARANDOLE_TCP_H

#include <sys/socket.h>

#include "authentication.h"
#include "messages.h"

#define NONCE_BYTES 32

/* The messages of a handshake, described in handshake.c. */
struct challenge {
    uint64_t magic;
    unsigned char nonce[NONCE_BYTES];
};

struct response {
    uint64_t magic;
    int32_t rank, ranks;         /* of the connecting process */
    unsigned char nonce[NONCE_BYTES];
    unsigned char proof[PROOF_BYTES];
};

_Static_assert(sizeof(struct challenge) == 40 && sizeof(struct response) == 80, "no padding");

enum out_state { UNCONNECTED, CONNECTING, AWAITS_CHALLENGE, AWAITS_CONFIRMATION, CONNECTED };

struct connection {
    struct sockaddr_storage address;
    socklen_t address_bytes;
    int out, in;                 /* -1: none */
    enum out_state state;        /* of `out` */
    bool out_ended;              /* no more data can be sent */
    bool in_ended;               /* all data from the other end were received */
    /* the handshake of `out` */
    struct challenge challenge;
    unsigned char confirmation[PROOF_BYTES], expected[PROOF_BYTES];
    size_t received;             /* bytes of the awaited message that have arrived */
};

/* An accepted connection whose response has not arrived. */
struct handshake {
    struct handshake *next;      /* an earlier one */
    double came;
    int socket;
    struct challenge challenge;
    struct response response;
    size_t received;
};

struct tcp_state {
    int listener, events, wake;
    struct sockaddr_storage own; /* source address of outgoing connections */
    socklen_t own_bytes;
    struct sockaddr_storage listens_at;
    unsigned char key[FRD_KEY_BYTES];
    double timeout;
    struct handshake *handshakes; /* latest first */
    int handshake_count;
    double accept_at;            /* when to accept again; 0: the listener is monitored */
};

/* The subject of an event; the event also holds a rank or a pointer. */
enum subject { LISTENER, WAKE, HANDSHAKE, INWARD, OUTWARD };
#define SUBJECT_BITS 3

/* tcp.c */
void watch(struct tcp_state *, int socket, enum subject, uint64_t which, uint32_t events);
void end_outward(struct peer *);

/* handshake.c; the lock is held */
void connect_to(struct peer *);
void continue_connecting(struct peer *, uint32_t events);
void on_listener(struct tcp_state *);
void on_handshake(struct frd_endpoint *, struct handshake *);
bool has_timers(const struct tcp_state *);
void check_timers(struct tcp_state *);         /* close late handshakes, and accept again after a pause */
void forget_handshake(struct tcp_state *, struct handshake *);

#endif
