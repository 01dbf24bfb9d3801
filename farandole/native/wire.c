/* Wires: the way to ranks of other hosts, over TCP.
 *
 * A rank opens a connection to every rank that it sends to, and sends on it only; what it receives comes on
 * connections that others opened to it.  So no two ranks ever wait for each other to answer a call, and a
 * connection needs no negotiation: the caller says who it is (`hello`, with a token that only the ranks of
 * the group know), and data follow.
 *
 * One thread per group moves data while nobody waits.  It hears of every socket once per change (the
 * kernel's edge-triggered events), which is enough: a stream is always moved until the socket has no more,
 * or until the message at its head has no receive, and then posting the receive moves it on.
 *
 * When a connection ends, that is all that is said here: `wire_has_ended`.  Why is for the caller to find out.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "internal.h"

#define MAGIC 0x656c6f646e617261u /* "arandole" */
#define HELLO 64
#define KEEPALIVE_S 2        /* a silent connection is asked so often whether its other end is there */
#define EVENTS 64

struct hello {
    uint64_t magic;
    char token[FRD_TOKEN_BYTES];
    int32_t rank, ranks;
    char padding[HELLO - 16 - FRD_TOKEN_BYTES];
};

_Static_assert(sizeof(struct hello) == HELLO, "a hello is one line");

enum out_state { UNCALLED, CALLING, OPEN };

struct wire {
    struct sockaddr_storage address;
    socklen_t address_bytes;
    int out, in;             /* -1: none */
    enum out_state state;    /* of `out` */
    bool ended;              /* no data will come or go any more */
};

/* A connection whose caller has not said who it is. */
struct caller {
    struct caller *next;
    int socket;
    struct hello hello;
    size_t moved;
};

struct wires {
    int listener, events, bell; /* the bell wakes the thread */
    struct sockaddr_storage own;
    socklen_t own_bytes;
    char token[FRD_TOKEN_BYTES];
    double timeout;
    struct caller *callers;
    pthread_t thread;
    bool stopping;
};

/* What an event is about: a kind, and a rank or a pointer. */
enum subject { LISTENER, BELL, CALLER, INWARD, OUTWARD };
#define SUBJECT_BITS 3

static void listen_to(struct wires *wires, int socket, enum subject subject, uint64_t which, uint32_t events)
{
    struct epoll_event event = {.events = events, .data.u64 = which << SUBJECT_BITS | subject};
    epoll_ctl(wires->events, EPOLL_CTL_ADD, socket, &event);
}

static void set_option(int socket, int level, int option, int value)
{
    setsockopt(socket, level, option, &value, sizeof value);
}

/* A dead connection is found out by the kernel, at the latest when the group's deadline has passed. */
static void prepare_socket(const struct wires *wires, int socket)
{
    set_option(socket, IPPROTO_TCP, TCP_NODELAY, 1);
    set_option(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
    set_option(socket, IPPROTO_TCP, TCP_KEEPIDLE, KEEPALIVE_S);
    set_option(socket, IPPROTO_TCP, TCP_KEEPINTVL, KEEPALIVE_S);
    set_option(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, (int)smaller((size_t)(1e3 * wires->timeout) + 1000, 0x7fffffff));
}

static void end_wire(struct frd_group *g, struct wire *wire)
{
    wire->ended = true;
    ring_doorbell(g, g->rank); /* whoever waits for it looks again */
}

static void ring_bell(struct wires *wires)
{
    const uint64_t once = 1;
    while (write(wires->bell, &once, sizeof once) < 0 && errno == EINTR) continue;
}

bool wire_has_ended(const struct peer *peer) { return peer->wire && peer->wire->ended; }

/* ---- calling ---- */

static void say_hello(struct frd_group *g, struct wire *wire)
{
    const struct mail *mail = &g->mail;
    struct hello hello = {.magic = MAGIC, .rank = mail->rank, .ranks = mail->ranks};
    memcpy(hello.token, mail->wires->token, FRD_TOKEN_BYTES);
    /* the socket's buffer is empty, so it is taken whole */
    if (send(wire->out, &hello, HELLO, MSG_NOSIGNAL | MSG_DONTWAIT) == HELLO) wire->state = OPEN;
    else end_wire(g, wire);
}

static void call(struct frd_group *g, struct peer *peer)
{
    struct wires *wires = g->mail.wires;
    struct wire *wire = peer->wire;
    wire->state = CALLING;
    wire->out = socket(wire->address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (wire->out < 0) {
        end_wire(g, wire);
        return;
    }
    prepare_socket(wires, wire->out);
    set_option(wire->out, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1);
    if (wires->own_bytes) bind(wire->out, (struct sockaddr *)&wires->own, wires->own_bytes);
    if (connect(wire->out, (struct sockaddr *)&wire->address, wire->address_bytes) && errno != EINPROGRESS)
        end_wire(g, wire);
    listen_to(wires, wire->out, OUTWARD, (uint64_t)peer->rank, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET);
}

static void on_outward(struct frd_group *g, struct peer *peer, uint32_t events)
{
    struct wire *wire = peer->wire;
    if (wire->state == CALLING && events & (EPOLLOUT | EPOLLERR)) {
        int error = 0;
        socklen_t bytes = sizeof error;
        getsockopt(wire->out, SOL_SOCKET, SO_ERROR, &error, &bytes);
        if (!error) say_hello(g, wire);
        else end_wire(g, wire);
    }
    if (peer->sends) push(g, peer);
    if (events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) end_wire(g, wire);
}

size_t wire_put(struct frd_group *g, struct peer *peer, const char *data, size_t bytes, bool more)
{
    struct wire *wire = peer->wire;
    if (!wire || wire->ended) return 0;
    if (wire->state == UNCALLED) call(g, peer);
    if (wire->state != OPEN) return 0;
    const ssize_t sent = send(wire->out, data, bytes, MSG_NOSIGNAL | MSG_DONTWAIT | (more ? MSG_MORE : 0));
    if (sent < 0 && errno != EAGAIN && errno != EINTR) end_wire(g, wire);
    return sent < 0 ? 0 : (size_t)sent;
}

/* ---- being called ---- */

static void on_listener(struct wires *wires)
{
    for (;;) {
        const int socket = accept4(wires->listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (socket < 0) return;
        struct caller *caller = calloc(1, sizeof *caller);
        if (!caller) {
            close(socket);
            continue;
        }
        prepare_socket(wires, socket);
        caller->socket = socket;
        caller->next = wires->callers;
        wires->callers = caller;
        listen_to(wires, socket, CALLER, (uint64_t)(uintptr_t)caller, EPOLLIN | EPOLLRDHUP);
    }
}

static void forget_caller(struct wires *wires, struct caller *caller)
{
    struct caller **list = &wires->callers;
    while (*list != caller) list = &(*list)->next;
    *list = caller->next;
    free(caller);
}

/* A rank of this group that has not called before?  Compares all of the token, however it differs. */
static struct wire *wire_of_caller(struct mail *mail, const struct hello *hello)
{
    unsigned char difference = 0;
    for (int i = 0; i < FRD_TOKEN_BYTES; i++) difference |= (unsigned char)(hello->token[i] ^ mail->wires->token[i]);
    if (difference || hello->magic != MAGIC || hello->ranks != mail->ranks) return NULL;
    if (hello->rank < 0 || hello->rank >= mail->ranks) return NULL;
    struct wire *wire = mail->peers[hello->rank].wire;
    return wire && wire->in < 0 && !wire->ended ? wire : NULL;
}

static void on_caller(struct frd_group *g, struct caller *caller)
{
    struct wires *wires = g->mail.wires;
    const ssize_t got =
        recv(caller->socket, (char *)&caller->hello + caller->moved, HELLO - caller->moved, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got > 0 && (caller->moved += (size_t)got) < HELLO) return;
    struct wire *wire = got > 0 ? wire_of_caller(&g->mail, &caller->hello) : NULL;
    epoll_ctl(wires->events, EPOLL_CTL_DEL, caller->socket, NULL);
    if (wire) {
        wire->in = caller->socket;
        listen_to(wires, wire->in, INWARD, (uint64_t)caller->hello.rank, EPOLLIN | EPOLLRDHUP | EPOLLET);
    } else {
        close(caller->socket); /* a stranger */
    }
    forget_caller(wires, caller);
}

size_t wire_take(struct frd_group *g, struct peer *peer, char *data, size_t bytes)
{
    struct wire *wire = peer->wire;
    if (!wire || wire->in < 0) return 0;
    const ssize_t got = recv(wire->in, data, bytes, MSG_DONTWAIT);
    if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) end_wire(g, wire);
    return got < 0 ? 0 : (size_t)got;
}

static bool pull_wanted(struct frd_group *g, struct peer *peer)
{
    return (g->mail.receives || peer->inbox.under_way) && pull(g, peer);
}

/* Data that came before the other end hung up still count, so the end is seen when they have been taken, or
 * when nobody wants them. */
static void on_inward(struct frd_group *g, struct peer *peer, uint32_t events)
{
    if (!pull_wanted(g, peer) && events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) end_wire(g, peer->wire);
}

/* Somebody has left a stream before it had to, so that others have their turn. */
static void on_bell(struct frd_group *g)
{
    uint64_t times;
    (void)!read(g->mail.wires->bell, &times, sizeof times);
    for (int r = 0; r < g->mail.ranks; r++) {
        struct peer *peer = &g->mail.peers[r];
        if (!peer->wire) continue;
        if (peer->sends) push(g, peer);
        pull_wanted(g, peer);
    }
}

void wires_remind(struct frd_group *g, const struct peer *peer)
{
    if (peer->wire) ring_bell(g->mail.wires);
}

/* ---- the thread ---- */

static void on_event(struct frd_group *g, const struct epoll_event *event)
{
    struct mail *mail = &g->mail;
    const uint64_t which = event->data.u64 >> SUBJECT_BITS;
    switch ((enum subject)(event->data.u64 & ((1 << SUBJECT_BITS) - 1))) {
    case BELL: on_bell(g); break;
    case LISTENER: on_listener(mail->wires); break;
    case CALLER: on_caller(g, (struct caller *)(uintptr_t)which); break;
    case OUTWARD: on_outward(g, &mail->peers[which], event->events); break;
    case INWARD: on_inward(g, &mail->peers[which], event->events); break;
    }
}

static void *wires_main(void *group)
{
    struct frd_group *g = group;
    struct wires *wires = g->mail.wires;
    struct epoll_event events[EVENTS];
    for (bool stopping = false; !stopping;) {
        const int count = epoll_wait(wires->events, events, EVENTS, -1);
        pthread_mutex_lock(&g->mail.lock);
        for (int i = 0; i < count; i++) on_event(g, &events[i]);
        stopping = wires->stopping;
        pthread_mutex_unlock(&g->mail.lock);
    }
    return NULL;
}

/* ---- opening and closing ---- */

int frd_wires_open(struct frd_group *g, int listener, const void *own, size_t own_bytes, const char *token)
{
    struct wires *wires = calloc(1, sizeof *wires);
    if (!wires) return -1;
    wires->listener = listener;
    wires->events = epoll_create1(EPOLL_CLOEXEC);
    wires->bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    wires->timeout = g->timeout;
    memcpy(&wires->own, own, own_bytes);
    wires->own_bytes = (socklen_t)own_bytes;
    memcpy(wires->token, token, FRD_TOKEN_BYTES);
    g->mail.wires = wires;
    listen_to(wires, listener, LISTENER, 0, EPOLLIN);
    listen_to(wires, wires->bell, BELL, 0, EPOLLIN);
    return 0;
}

int frd_wires_address(struct frd_group *g, int rank, const void *address, size_t bytes)
{
    struct wire *wire = calloc(1, sizeof *wire);
    if (!wire) return -1;
    memcpy(&wire->address, address, bytes);
    wire->address_bytes = (socklen_t)bytes;
    wire->out = wire->in = -1;
    g->mail.peers[rank].wire = wire;
    return 0;
}

int frd_wires_start(struct frd_group *g) { return pthread_create(&g->mail.wires->thread, NULL, wires_main, g); }

void frd_wires_call(struct frd_group *g, int rank)
{
    struct peer *peer = &g->mail.peers[rank];
    pthread_mutex_lock(&g->mail.lock);
    if (peer->wire && peer->wire->state == UNCALLED) call(g, peer);
    pthread_mutex_unlock(&g->mail.lock);
}

double frd_wires_silence(struct frd_group *g, int rank)
{
    const struct wire *wire = g->mail.peers[rank].wire;
    if (!wire) return -1;
    double silence = -1;
    const int sockets[2] = {wire->in, wire->out};
    for (int i = 0; i < 2; i++) {
        struct tcp_info info;
        socklen_t bytes = sizeof info;
        if (sockets[i] < 0 || getsockopt(sockets[i], IPPROTO_TCP, TCP_INFO, &info, &bytes)) continue;
        const double heard = 1e-3 * (double)smaller(info.tcpi_last_ack_recv, info.tcpi_last_data_recv);
        if (silence < 0 || heard < silence) silence = heard;
    }
    return silence;
}

static void close_socket(int *socket)
{
    if (*socket >= 0) close(*socket);
    *socket = -1;
}

void frd_wires_hang_up(struct frd_group *g)
{
    struct mail *mail = &g->mail;
    pthread_mutex_lock(&mail->lock);
    for (int r = 0; r < mail->ranks; r++) {
        struct wire *wire = mail->peers[r].wire;
        if (!wire) continue;
        wire->ended = true;
        close_socket(&wire->in);
        close_socket(&wire->out);
        wire->state = CALLING; /* not to be called again */
    }
    pthread_mutex_unlock(&mail->lock);
    ring_doorbell(g, g->rank);
}

void wires_stop(struct frd_group *g)
{
    struct wires *wires = g->mail.wires;
    if (!wires) return;
    if (wires->thread) {
        pthread_mutex_lock(&g->mail.lock);
        wires->stopping = true;
        pthread_mutex_unlock(&g->mail.lock);
        ring_bell(wires);
        pthread_join(wires->thread, NULL);
    }
    frd_wires_hang_up(g);
    for (int r = 0; r < g->mail.ranks; r++) free(g->mail.peers[r].wire);
    while (wires->callers) {
        close(wires->callers->socket);
        forget_caller(wires, wires->callers);
    }
    close_socket(&wires->listener);
    close_socket(&wires->events);
    close_socket(&wires->bell);
    free(wires);
    g->mail.wires = NULL;
}
