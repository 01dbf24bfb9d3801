/* The transport to processes of other hosts: TCP.
 *
 * A process opens a connection to every process that it sends to, and sends on it only; what it receives comes on
 * connections that others opened to it.  So no two processes ever wait for each other to accept a connection, and it
 * needs no negotiation: the connecting process identifies itself (`hello`, with a token that only the processes of the
 * job know), and data follow.
 *
 * Sockets are edge-triggered: the progress thread gets one event per change.  That is enough, because a stream is always
 * moved until the socket is empty, or until the message at its head has no receive, and then posting the receive
 * moves it on.
 *
 * The two directions end separately: a process that has sent its last message closes both connections, and its last data
 * may still be on a slow link when the end of the other connection is seen.  A receive fails at the end of the inward
 * stream, after all its data; a send fails at the end of the outward one.  The caller finds out why they ended.
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
#include <time.h>
#include <unistd.h>

#include "messages.h"

#define MAGIC 0x656c6f646e617261u /* "arandole" */
#define HELLO 64
#define KEEPALIVE_S 2        /* interval of keep-alive probes on an idle connection */
#define EVENTS 64
#define HANDSHAKES 256       /* connections whose hello has not arrived; beyond, the oldest is closed */
#define HELLO_S 10.0         /* how long a hello may take */
#define ACCEPT_AGAIN_S 0.1   /* after a connection could not be accepted for lack of descriptors or memory */

struct hello {
    uint64_t magic;
    char token[FRD_TOKEN_BYTES];
    int32_t rank, ranks;
    char padding[HELLO - 16 - FRD_TOKEN_BYTES];
};

_Static_assert(sizeof(struct hello) == HELLO, "a hello is one line");

enum out_state { UNCONNECTED, CONNECTING, CONNECTED };

struct connection {
    struct sockaddr_storage address;
    socklen_t address_bytes;
    int out, in;             /* -1: none */
    enum out_state state;    /* of `out` */
    bool out_ended;          /* nothing can be sent any more */
    bool in_ended;           /* everything that the other end has sent was received */
};

/* An accepted connection whose hello has not arrived. */
struct handshake {
    struct handshake *next;      /* one that came before */
    double came;
    int socket;
    struct hello hello;
    size_t moved;
};

struct tcp_state {
    int listener, events, wake;
    struct sockaddr_storage own;
    socklen_t own_bytes;
    char token[FRD_TOKEN_BYTES];
    double timeout;
    struct handshake *handshakes; /* the latest first */
    int handshake_count;
    double accept_at;            /* when to accept again; 0: the listener is watched */
};

/* What an event is about: a kind, and a rank or a pointer. */
enum subject { LISTENER, WAKE, HANDSHAKE, INWARD, OUTWARD };
#define SUBJECT_BITS 3

static void watch(struct tcp_state *tcp, int socket, enum subject subject, uint64_t which, uint32_t events)
{
    struct epoll_event event = {.events = events, .data.u64 = which << SUBJECT_BITS | subject};
    epoll_ctl(tcp->events, EPOLL_CTL_ADD, socket, &event);
}

static void set_option(int socket, int level, int option, int value)
{
    setsockopt(socket, level, option, &value, sizeof value);
}

/* A dead connection is found out by the kernel, at the latest when the job's timeout has passed. */
static void prepare_socket(const struct tcp_state *tcp, int socket)
{
    set_option(socket, IPPROTO_TCP, TCP_NODELAY, 1);
    set_option(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
    set_option(socket, IPPROTO_TCP, TCP_KEEPIDLE, KEEPALIVE_S);
    set_option(socket, IPPROTO_TCP, TCP_KEEPINTVL, KEEPALIVE_S);
    set_option(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, (int)smaller((size_t)(1e3 * tcp->timeout) + 1000, 0x7fffffff));
}

static void end_stream(struct peer *peer, bool *ended)
{
    if (!*ended) ring_own_bell(peer->endpoint); /* threads that wait for it look again */
    *ended = true;
}

static void end_outward(struct peer *peer) { end_stream(peer, &peer->connection->out_ended); }
static void end_inward(struct peer *peer) { end_stream(peer, &peer->connection->in_ended); }

static bool has_stream_ended(const struct peer *peer, bool sends)
{
    const struct connection *c = peer->connection;
    return c && (sends ? c->out_ended : c->in_ended || (c->in < 0 && c->out_ended));
}

void tcp_wake(struct frd_endpoint *e)
{
    const uint64_t once = 1;
    while (write(e->tcp->wake, &once, sizeof once) < 0 && errno == EINTR) continue;
}

/* ---- connecting ---- */

static void say_hello(struct peer *peer)
{
    const struct frd_endpoint *e = peer->endpoint;
    struct connection *c = peer->connection;
    struct hello hello = {.magic = MAGIC, .rank = e->rank, .ranks = e->ranks};
    memcpy(hello.token, e->tcp->token, FRD_TOKEN_BYTES);
    /* the socket's buffer is empty, so it is taken whole */
    if (send(c->out, &hello, HELLO, MSG_NOSIGNAL | MSG_DONTWAIT) == HELLO) c->state = CONNECTED;
    else end_outward(peer);
}

static void connect_to(struct peer *peer)
{
    struct tcp_state *tcp = peer->endpoint->tcp;
    struct connection *c = peer->connection;
    c->state = CONNECTING;
    c->out = socket(c->address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (c->out < 0) {
        end_outward(peer);
        return;
    }
    prepare_socket(tcp, c->out);
    set_option(c->out, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1);
    if (tcp->own_bytes) bind(c->out, (struct sockaddr *)&tcp->own, tcp->own_bytes);
    if (connect(c->out, (struct sockaddr *)&c->address, c->address_bytes) && errno != EINPROGRESS) end_outward(peer);
    watch(tcp, c->out, OUTWARD, (uint64_t)peer->rank, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET);
}

static void on_outward(struct peer *peer, uint32_t events)
{
    struct connection *c = peer->connection;
    if (c->state == CONNECTING && events & (EPOLLOUT | EPOLLERR)) {
        int error = 0;
        socklen_t bytes = sizeof error;
        getsockopt(c->out, SOL_SOCKET, SO_ERROR, &error, &bytes);
        if (!error) say_hello(peer);
        else end_outward(peer);
    }
    if (peer->sends.first) push(peer);
    if (events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) end_outward(peer);
}

static size_t put(struct peer *peer, const char *data, size_t bytes, bool more)
{
    struct connection *c = peer->connection;
    if (!c || c->out_ended || !bytes) return 0;
    if (c->state == UNCONNECTED) connect_to(peer);
    if (c->state != CONNECTED) return 0;
    const ssize_t sent = send(c->out, data, bytes, MSG_NOSIGNAL | MSG_DONTWAIT | (more ? MSG_MORE : 0));
    if (sent < 0 && errno != EAGAIN && errno != EINTR) end_outward(peer);
    return sent < 0 ? 0 : (size_t)sent;
}

/* ---- accepting connections ---- */

static void forget_handshake(struct tcp_state *tcp, struct handshake *handshake)
{
    struct handshake **list = &tcp->handshakes;
    while (*list != handshake) list = &(*list)->next;
    *list = handshake->next;
    tcp->handshake_count--;
    free(handshake);
}

/* Closes the handshakes that came before `time`, and the oldest if there are more than `most`. */
static void close_handshakes(struct tcp_state *tcp, double time, int most)
{
    int kept = 0;
    for (struct handshake *handshake = tcp->handshakes, *next; handshake; handshake = next) {
        next = handshake->next;
        if (handshake->came >= time && kept++ < most) continue;
        close(handshake->socket);
        forget_handshake(tcp, handshake);
    }
}

/* A full table of descriptors would report the listener as ready all the time, so it is not watched for a while. */
static void stop_accepting(struct tcp_state *tcp)
{
    epoll_ctl(tcp->events, EPOLL_CTL_DEL, tcp->listener, NULL);
    tcp->accept_at = seconds_now() + ACCEPT_AGAIN_S;
    close_handshakes(tcp, 0, tcp->handshake_count / 2);
}

static void on_listener(struct tcp_state *tcp)
{
    for (;;) {
        const int socket = accept4(tcp->listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (socket < 0 && (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM))
            stop_accepting(tcp);
        if (socket < 0 && errno != ECONNABORTED && errno != EINTR) return;
        struct handshake *handshake = socket < 0 ? NULL : calloc(1, sizeof *handshake);
        if (!handshake) {
            if (socket >= 0) close(socket);
            continue;
        }
        prepare_socket(tcp, socket);
        *handshake = (struct handshake){.next = tcp->handshakes, .came = seconds_now(), .socket = socket};
        tcp->handshakes = handshake;
        tcp->handshake_count++;
        watch(tcp, socket, HANDSHAKE, (uint64_t)(uintptr_t)handshake, EPOLLIN | EPOLLRDHUP);
        if (tcp->handshake_count > HANDSHAKES) close_handshakes(tcp, 0, HANDSHAKES);
    }
}

/* What is due at a time, not at an event. */
static void check_timers(struct tcp_state *tcp)
{
    const double now = seconds_now();
    if (tcp->handshakes) close_handshakes(tcp, now - HELLO_S, HANDSHAKES);
    if (!tcp->accept_at || now < tcp->accept_at) return;
    tcp->accept_at = 0;
    watch(tcp, tcp->listener, LISTENER, 0, EPOLLIN);
}

/* The process of this job that sent the hello; NULL if none, or if it has connected before.  The comparison of the tokens takes
 * the same time wherever they differ. */
static struct peer *known(struct frd_endpoint *e, const struct hello *hello)
{
    unsigned char difference = 0;
    for (int i = 0; i < FRD_TOKEN_BYTES; i++) difference |= (unsigned char)(hello->token[i] ^ e->tcp->token[i]);
    if (difference || hello->magic != MAGIC || hello->ranks != e->ranks) return NULL;
    if (!is_rank(hello->rank, e->ranks)) return NULL;
    struct peer *peer = &e->peers[hello->rank];
    return peer->connection && peer->connection->in < 0 ? peer : NULL;
}

static void on_handshake(struct frd_endpoint *e, struct handshake *handshake)
{
    struct tcp_state *tcp = e->tcp;
    const struct handshake *still = tcp->handshakes; /* an event before this one may have closed it */
    while (still && still != handshake) still = still->next;
    if (!still) return;
    const ssize_t got =
        recv(handshake->socket, (char *)&handshake->hello + handshake->moved, HELLO - handshake->moved, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got > 0 && (handshake->moved += (size_t)got) < HELLO) return;
    struct peer *peer = got > 0 ? known(e, &handshake->hello) : NULL;
    epoll_ctl(tcp->events, EPOLL_CTL_DEL, handshake->socket, NULL);
    if (peer) {
        peer->connection->in = handshake->socket;
        watch(tcp, handshake->socket, INWARD, (uint64_t)peer->rank, EPOLLIN | EPOLLRDHUP | EPOLLET);
    } else {
        close(handshake->socket);
    }
    forget_handshake(tcp, handshake);
}

static size_t take(struct peer *peer, char *data, size_t bytes)
{
    struct connection *c = peer->connection;
    if (!c || c->in < 0) return 0;
    const ssize_t got = recv(c->in, data, bytes, MSG_DONTWAIT);
    if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) end_inward(peer);
    return got < 0 ? 0 : (size_t)got;
}

/* There will be no other event after the end, so all data are taken now, unless the first ones wait for a receive. */
static void on_inward(struct peer *peer, uint32_t events)
{
    const bool closed = events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR);
    while (pull(peer) && closed) continue;
    if (closed && !peer->in.blocked) end_inward(peer);
}

/* Continues streams that were left so that others had their turn. */
static void on_wake(struct frd_endpoint *e)
{
    uint64_t times;
    (void)!read(e->tcp->wake, &times, sizeof times);
    for (int r = 0; r < e->ranks; r++) {
        struct peer *peer = &e->peers[r];
        if (!peer->connection) continue;
        if (peer->sends.first) push(peer);
        pull(peer);
    }
}

static void nothing(struct peer *peer) { (void)peer; }
static void again(struct peer *peer) { tcp_wake(peer->endpoint); }

static void refuse(struct peer *peer)
{
    if (peer->connection && peer->connection->in >= 0) shutdown(peer->connection->in, SHUT_RDWR);
    end_inward(peer);
}

const struct transport over_tcp = {
    .put = put, .take = take, .moved_out = nothing, .moved_in = nothing, .again = again, .refuse = refuse,
    .has_ended = has_stream_ended,
};

/* ---- the progress thread ---- */

static void on_event(struct frd_endpoint *e, const struct epoll_event *event)
{
    const uint64_t which = event->data.u64 >> SUBJECT_BITS;
    switch ((enum subject)(event->data.u64 & ((1 << SUBJECT_BITS) - 1))) {
    case WAKE: on_wake(e); break;
    case LISTENER: on_listener(e->tcp); break;
    case HANDSHAKE: on_handshake(e, (struct handshake *)(uintptr_t)which); break;
    case OUTWARD: on_outward(&e->peers[which], event->events); break;
    case INWARD: on_inward(&e->peers[which], event->events); break;
    }
}

void tcp_wait(struct frd_endpoint *e, double seconds)
{
    struct epoll_event events[EVENTS];
    if (e->tcp->accept_at || e->tcp->handshakes) seconds = seconds < ACCEPT_AGAIN_S ? seconds : ACCEPT_AGAIN_S;
    const struct timespec t = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    const int count = epoll_pwait2(e->tcp->events, events, EVENTS, &t, NULL);
    const bool timed = e->tcp->accept_at || e->tcp->handshakes; /* only this thread changes them */
    if (count <= 0 && !timed) return;
    pthread_mutex_lock(&e->lock);
    for (int i = 0; i < count; i++) on_event(e, &events[i]);
    check_timers(e->tcp);
    pthread_mutex_unlock(&e->lock);
    if (count <= 0) return;
    ring_own_bell(e);
}

/* ---- opening and closing ---- */

int frd_tcp_open(struct frd_endpoint *e, int listener, const void *own, size_t own_bytes, const char *token, double timeout)
{
    struct tcp_state *tcp = calloc(1, sizeof *tcp);
    if (!tcp) return FRD_NO_MEMORY;
    tcp->listener = listener;
    tcp->events = epoll_create1(EPOLL_CLOEXEC);
    tcp->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    tcp->timeout = timeout;
    memcpy(&tcp->own, own, own_bytes);
    tcp->own_bytes = (socklen_t)own_bytes;
    memcpy(tcp->token, token, FRD_TOKEN_BYTES);
    e->tcp = tcp;
    watch(tcp, listener, LISTENER, 0, EPOLLIN);
    watch(tcp, tcp->wake, WAKE, 0, EPOLLIN);
    return FRD_OK;
}

int frd_tcp_add(struct frd_endpoint *e, int rank, const void *address, size_t bytes)
{
    if (!is_rank(rank, e->ranks)) return FRD_INVALID;
    struct connection *c = calloc(1, sizeof *c);
    if (!c) return FRD_NO_MEMORY;
    memcpy(&c->address, address, bytes);
    c->address_bytes = (socklen_t)bytes;
    c->out = c->in = -1;
    e->peers[rank].connection = c;
    return FRD_OK;
}

void frd_connect(struct frd_group *g, int rank)
{
    struct peer *peer = g->members[rank].peer;
    pthread_mutex_lock(&g->endpoint->lock);
    if (peer->connection && peer->connection->state == UNCONNECTED) connect_to(peer);
    pthread_mutex_unlock(&g->endpoint->lock);
}

bool tcp_is_in_use(const struct peer *peer)
{
    const struct connection *c = peer->connection;
    return c && !c->out_ended && (c->in >= 0 || c->state != UNCONNECTED);
}

double frd_silence(struct frd_group *g, int rank)
{
    const struct connection *c = g->members[rank].peer->connection;
    if (!c) return -1;
    double silence = -1;
    const int sockets[2] = {c->in, c->out};
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

void tcp_close_sockets(struct frd_endpoint *e)
{
    struct tcp_state *tcp = e->tcp;
    for (int r = 0; r < e->ranks && tcp; r++) {
        struct connection *c = e->peers[r].connection;
        if (!c) continue;
        close_socket(&c->in);
        close_socket(&c->out);
    }
    if (!tcp) return;
    for (struct handshake *handshake = tcp->handshakes; handshake; handshake = handshake->next) close_socket(&handshake->socket);
    close_socket(&tcp->listener);
    close_socket(&tcp->events);
    close_socket(&tcp->wake);
}

void tcp_stop(struct frd_endpoint *e)
{
    struct tcp_state *tcp = e->tcp;
    if (!tcp) return;
    tcp_close_sockets(e);
    for (int r = 0; r < e->ranks; r++) {
        free(e->peers[r].connection);
        e->peers[r].connection = NULL;
    }
    while (tcp->handshakes) forget_handshake(tcp, tcp->handshakes);
    free(tcp);
    e->tcp = NULL;
}
