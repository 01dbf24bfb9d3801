/* Opening connections, and accepting only connections from processes of the job.
 *
 * Both ends prove that they know the key of the job, without sending it:
 *
 *     acceptor  -> connector   challenge      a random number A
 *     connector -> acceptor    response       its rank, a random number C, HMAC(key, "connects" | S)
 *     acceptor  -> connector   confirmation   HMAC(key, "accepts" | S)
 *
 * S, the statement, contains both ranks, the number of ranks, the acceptor's address and port, A and C.  The connector
 * sends data only after the confirmation.
 *
 * Proof that a program without the key neither sends data to a process of the job nor receives data from one.
 * (Sending.)  A process accepts data only from a connection whose response holds a valid proof for its A.  A is random,
 * so an earlier response is not valid again.  Only a process of the job can compute the proof, and only for a
 * connection that it opens itself.  The proof of an acceptor is not valid, because its label differs.  The response to
 * another process is not valid, because S contains both ranks and the acceptor's address.  (Receiving.)  Likewise the
 * confirmation depends on the C of this connection, and only the process that listens at the address of the connection
 * computes it.  The handshake does not protect against a program on the path between the two addresses: data are
 * neither encrypted nor signed.
 *
 * Two processes never deadlock while they connect to each other: the progress thread of the acceptor replies without
 * waiting, and the messages are smaller than any socket's send buffer, which is empty at that time.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/random.h>
#include <unistd.h>

#include "tcp.h"

#define MAGIC 0x656c6f646e617261u /* "arandole" */
#define KEEPALIVE_S 2        /* interval of keep-alive probes on an idle connection */
#define HANDSHAKES 256       /* maximum number of connections without a response; beyond it, the oldest is closed */
#define HANDSHAKE_S 10.0     /* longest wait for a response */
#define ACCEPT_AGAIN_S 0.1   /* pause after a connection could not be accepted for lack of descriptors or memory */

static void set_option(int socket, int level, int option, int value)
{
    setsockopt(socket, level, option, &value, sizeof value);
}

/* Enables keep-alive probes, and sets the user timeout, after which the kernel ends a dead connection, to the timeout
 * of the job plus 1 s. */
static void prepare_socket(const struct tcp_state *tcp, int socket)
{
    set_option(socket, IPPROTO_TCP, TCP_NODELAY, 1);
    set_option(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
    set_option(socket, IPPROTO_TCP, TCP_KEEPIDLE, KEEPALIVE_S);
    set_option(socket, IPPROTO_TCP, TCP_KEEPINTVL, KEEPALIVE_S);
    set_option(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, (int)smaller((size_t)(1e3 * tcp->timeout) + 1000, 0x7fffffff));
}

/* ---- the messages ---- */

static bool make_nonce(unsigned char nonce[NONCE_BYTES])
{
    return getrandom(nonce, NONCE_BYTES, 0) == NONCE_BYTES;
}

static bool send_message(int socket, const void *message, size_t bytes)
{
    return send(socket, message, bytes, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)bytes;
}

enum reading { COMPLETE, PARTIAL, ENDED };

static enum reading read_message(int socket, void *message, size_t bytes, size_t *received)
{
    const ssize_t got = recv(socket, (char *)message + *received, bytes - *received, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return PARTIAL;
    if (got <= 0) return ENDED;
    *received += (size_t)got;
    return *received == bytes ? COMPLETE : PARTIAL;
}

/* Computes the proof of the accepting process (`accepts`) or the connecting process. */
static void prove(const struct tcp_state *tcp, bool accepts, int connector, int acceptor, int ranks,
                  const struct sockaddr_storage *address, const unsigned char *challenge, const unsigned char *response,
                  unsigned char proof[PROOF_BYTES])
{
    struct {
        char label[16];
        int32_t connector, acceptor, ranks;
        uint32_t port;
        unsigned char address[16];
        unsigned char challenge[NONCE_BYTES], response[NONCE_BYTES];
    } statement = {.connector = connector, .acceptor = acceptor, .ranks = ranks};
    strcpy(statement.label, accepts ? "accepts" : "connects");
    if (address->ss_family == AF_INET6) {
        const struct sockaddr_in6 *a = (const struct sockaddr_in6 *)address;
        statement.port = ntohs(a->sin6_port);
        memcpy(statement.address, &a->sin6_addr, sizeof a->sin6_addr);
    } else {
        const struct sockaddr_in *a = (const struct sockaddr_in *)address;
        statement.port = ntohs(a->sin_port);
        memcpy(statement.address, &a->sin_addr, sizeof a->sin_addr);
    }
    memcpy(statement.challenge, challenge, NONCE_BYTES);
    memcpy(statement.response, response, NONCE_BYTES);
    hmac_sha256(tcp->key, &statement, sizeof statement, proof);
}

/* ---- connecting ---- */

void connect_to(struct peer *peer)
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

static bool respond(struct peer *peer)
{
    const struct frd_endpoint *e = peer->endpoint;
    struct connection *c = peer->connection;
    struct response response = {.magic = MAGIC, .rank = e->rank, .ranks = e->ranks};
    if (c->challenge.magic != MAGIC || !make_nonce(response.nonce)) return false;
    prove(e->tcp, false, e->rank, peer->rank, e->ranks, &c->address, c->challenge.nonce, response.nonce, response.proof);
    prove(e->tcp, true, e->rank, peer->rank, e->ranks, &c->address, c->challenge.nonce, response.nonce, c->expected);
    return send_message(c->out, &response, sizeof response);
}

void continue_connecting(struct peer *peer, uint32_t events)
{
    struct connection *c = peer->connection;
    enum reading reading = COMPLETE;
    if (c->state == CONNECTING && events & (EPOLLOUT | EPOLLERR)) {
        int error = 0;
        socklen_t bytes = sizeof error;
        getsockopt(c->out, SOL_SOCKET, SO_ERROR, &error, &bytes);
        if (error) end_outward(peer);
        else c->state = AWAITS_CHALLENGE;
    }
    /* one event may cover several segments of a message, so read until the socket is empty */
    while (c->state == AWAITS_CHALLENGE && !c->out_ended) {
        const size_t before = c->received;
        reading = read_message(c->out, &c->challenge, sizeof c->challenge, &c->received);
        if (reading == ENDED || (reading == COMPLETE && !respond(peer))) end_outward(peer);
        else if (reading == COMPLETE) c->state = AWAITS_CONFIRMATION, c->received = 0;
        else if (c->received == before) return;
    }
    while (c->state == AWAITS_CONFIRMATION && !c->out_ended) {
        const size_t before = c->received;
        reading = read_message(c->out, c->confirmation, sizeof c->confirmation, &c->received);
        if (reading == ENDED || (reading == COMPLETE && !are_equal_proofs(c->confirmation, c->expected))) end_outward(peer);
        else if (reading == COMPLETE) c->state = CONNECTED;
        else if (c->received == before) return;
    }
}

/* ---- accepting ---- */

void forget_handshake(struct tcp_state *tcp, struct handshake *handshake)
{
    struct handshake **list = &tcp->handshakes;
    while (*list != handshake) list = &(*list)->next;
    *list = handshake->next;
    tcp->handshake_count--;
    free(handshake);
}

/* Closes the handshakes that started before `time`; of the others, keeps only the latest `most`. */
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

/* Stops monitoring the listener for a while: without free descriptors, the listener would always be ready. */
static void stop_accepting(struct tcp_state *tcp)
{
    epoll_ctl(tcp->events, EPOLL_CTL_DEL, tcp->listener, NULL);
    tcp->accept_at = seconds_now() + ACCEPT_AGAIN_S;
    close_handshakes(tcp, 0, tcp->handshake_count / 2);
}

static struct handshake *challenge(struct tcp_state *tcp, int socket)
{
    struct handshake *handshake = calloc(1, sizeof *handshake);
    if (!handshake) return NULL;
    prepare_socket(tcp, socket);
    *handshake = (struct handshake){.came = seconds_now(), .socket = socket, .challenge.magic = MAGIC};
    if (make_nonce(handshake->challenge.nonce) &&
        send_message(socket, &handshake->challenge, sizeof handshake->challenge)) return handshake;
    free(handshake);
    return NULL;
}

void on_listener(struct tcp_state *tcp)
{
    for (;;) {
        const int socket = accept4(tcp->listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (socket < 0 && (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM))
            stop_accepting(tcp);
        if (socket < 0 && errno != ECONNABORTED && errno != EINTR) return;
        struct handshake *handshake = socket < 0 ? NULL : challenge(tcp, socket);
        if (!handshake) {
            if (socket >= 0) close(socket);
            continue;
        }
        handshake->next = tcp->handshakes;
        tcp->handshakes = handshake;
        tcp->handshake_count++;
        watch(tcp, socket, HANDSHAKE, (uint64_t)(uintptr_t)handshake, EPOLLIN | EPOLLRDHUP);
        if (tcp->handshake_count > HANDSHAKES) close_handshakes(tcp, 0, HANDSHAKES);
    }
}

/* Sends the confirmation of a valid response and returns the connecting process; NULL if the response is invalid or the
 * process is already connected. */
static struct peer *confirm(struct frd_endpoint *e, const struct handshake *handshake)
{
    const struct response *r = &handshake->response;
    unsigned char proof[PROOF_BYTES];
    if (r->magic != MAGIC || r->ranks != e->ranks || !is_rank(r->rank, e->ranks)) return NULL;
    struct peer *peer = &e->peers[r->rank];
    if (!peer->connection || peer->connection->in >= 0) return NULL;
    const unsigned char *challenge = handshake->challenge.nonce;
    prove(e->tcp, false, r->rank, e->rank, e->ranks, &e->tcp->listens_at, challenge, r->nonce, proof);
    if (!are_equal_proofs(proof, r->proof)) return NULL;
    prove(e->tcp, true, r->rank, e->rank, e->ranks, &e->tcp->listens_at, challenge, r->nonce, proof);
    return send_message(handshake->socket, proof, sizeof proof) ? peer : NULL;
}

void on_handshake(struct frd_endpoint *e, struct handshake *handshake)
{
    struct tcp_state *tcp = e->tcp;
    const struct handshake *still = tcp->handshakes; /* an earlier event may have closed the handshake */
    while (still && still != handshake) still = still->next;
    if (!still) return;
    const enum reading reading =
        read_message(handshake->socket, &handshake->response, sizeof handshake->response, &handshake->received);
    if (reading == PARTIAL) return;
    struct peer *peer = reading == COMPLETE ? confirm(e, handshake) : NULL;
    epoll_ctl(tcp->events, EPOLL_CTL_DEL, handshake->socket, NULL);
    if (peer) {
        peer->connection->in = handshake->socket;
        watch(tcp, handshake->socket, INWARD, (uint64_t)peer->rank, EPOLLIN | EPOLLRDHUP | EPOLLET);
    } else {
        close(handshake->socket);
    }
    forget_handshake(tcp, handshake);
}

bool has_timers(const struct tcp_state *tcp) { return tcp->accept_at || tcp->handshakes; }

void check_timers(struct tcp_state *tcp)
{
    const double now = seconds_now();
    if (tcp->handshakes) close_handshakes(tcp, now - HANDSHAKE_S, HANDSHAKES);
    if (!tcp->accept_at || now < tcp->accept_at) return;
    tcp->accept_at = 0;
    watch(tcp, tcp->listener, LISTENER, 0, EPOLLIN);
}
