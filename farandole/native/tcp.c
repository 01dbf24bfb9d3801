/* The transport to processes of other hosts: TCP.
 *
 * A process opens a connection to every process to which it sends, and only sends on it.  It receives on connections
 * that other processes have opened.  handshake.c opens and accepts connections.
 *
 * Sockets are edge-triggered: the progress thread gets one event per change.  This suffices, because a stream is always
 * read until the socket is empty or until the message at its head has no receive; posting the receive then continues
 * the stream.
 *
 * The two directions end separately: a process that has sent its last message closes both connections, and its last
 * data may still be on a slow link when the end of the other connection is seen.  A receive fails at the end of the
 * inward stream, after all its data; a send fails at the end of the outward stream.  The caller determines why a stream
 * ended.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "tcp.h"

#define EVENTS 64
#define TIMER_S 0.1 /* interval between checks of the handshake timers */

void watch(struct tcp_state *tcp, int socket, enum subject subject, uint64_t which, uint32_t events)
{
    struct epoll_event event = {.events = events, .data.u64 = which << SUBJECT_BITS | subject};
    epoll_ctl(tcp->events, EPOLL_CTL_ADD, socket, &event);
}

static void end_stream(struct peer *peer, bool *ended)
{
    if (!*ended) ring_own_bell(peer->endpoint); /* wake threads that wait for the peer */
    *ended = true;
}

void end_outward(struct peer *peer) { end_stream(peer, &peer->connection->out_ended); }
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

/* ---- moving bytes ---- */

static void on_outward(struct peer *peer, uint32_t events)
{
    continue_connecting(peer, events);
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

static size_t take(struct peer *peer, char *data, size_t bytes)
{
    struct connection *c = peer->connection;
    if (!c || c->in < 0) return 0;
    const ssize_t got = recv(c->in, data, bytes, MSG_DONTWAIT);
    if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) end_inward(peer);
    return got < 0 ? 0 : (size_t)got;
}

/* No event follows the end, so all data are read here, unless the message at the head waits for a receive. */
static void on_inward(struct peer *peer, uint32_t events)
{
    const bool closed = events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR);
    while (pull(peer) && closed) continue;
    if (closed && !peer->in.blocked) end_inward(peer);
}

/* Continues streams that were interrupted so that other streams could progress. */
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

/* Waits for events, with microsecond resolution on Linux 5.11 or later.  Makes the system call directly, because glibc
 * before 2.35 has no wrapper. */
static int wait_for_events(int epoll, struct epoll_event *events, double seconds)
{
#ifdef SYS_epoll_pwait2
    const struct timespec t = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    const int count = (int)syscall(SYS_epoll_pwait2, epoll, events, EVENTS, &t, NULL, 0);
    if (count >= 0 || errno != ENOSYS) return count;
#endif
    return epoll_wait(epoll, events, EVENTS, (int)(seconds * 1e3) + 1); /* rounded up: a wait of 0 ms would spin */
}

void tcp_wait(struct frd_endpoint *e, double seconds)
{
    struct epoll_event events[EVENTS];
    if (has_timers(e->tcp)) seconds = seconds < TIMER_S ? seconds : TIMER_S;
    const int count = wait_for_events(e->tcp->events, events, seconds);
    const bool timed = has_timers(e->tcp); /* only this thread changes them */
    if (count <= 0 && !timed) return;
    pthread_mutex_lock(&e->lock);
    for (int i = 0; i < count; i++) on_event(e, &events[i]);
    check_timers(e->tcp);
    pthread_mutex_unlock(&e->lock);
    if (count <= 0) return;
    ring_own_bell(e);
}

/* ---- opening and closing ---- */

int frd_tcp_open(struct frd_endpoint *e, int listener, const void *own, size_t own_bytes, const unsigned char *key, double timeout)
{
    struct tcp_state *tcp = calloc(1, sizeof *tcp);
    if (!tcp) return FRD_NO_MEMORY;
    socklen_t bytes = sizeof tcp->listens_at;
    tcp->listener = listener;
    getsockname(listener, (struct sockaddr *)&tcp->listens_at, &bytes);
    tcp->events = epoll_create1(EPOLL_CLOEXEC);
    tcp->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    tcp->timeout = timeout;
    memcpy(&tcp->own, own, own_bytes);
    tcp->own_bytes = (socklen_t)own_bytes;
    memcpy(tcp->key, key, FRD_KEY_BYTES);
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

bool tcp_has_been_cut(const struct peer *peer)
{
    const struct connection *c = peer->connection;
    return c && c->in >= 0 && c->in_ended;
}

double frd_silence(struct frd_group *g, int rank)
{
    const struct connection *c = g->members[rank].peer->connection;
    if (!c) return -1;
    double silence = -1;
    pthread_mutex_lock(&g->endpoint->lock);
    const int sockets[2] = {c->in, c->out};
    for (int i = 0; i < 2; i++) {
        struct tcp_info info;
        socklen_t bytes = sizeof info;
        if (sockets[i] < 0 || getsockopt(sockets[i], IPPROTO_TCP, TCP_INFO, &info, &bytes)) continue;
        if (info.tcpi_state == TCP_SYN_SENT) continue; /* not connected yet */
        const double heard = 1e-3 * (double)smaller(info.tcpi_last_ack_recv, info.tcpi_last_data_recv);
        if (silence < 0 || heard < silence) silence = heard;
    }
    pthread_mutex_unlock(&g->endpoint->lock);
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
