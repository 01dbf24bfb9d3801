/* Fuzzes both sides of the handshake between hosts: handshake.c, over socket pairs.
 *
 * The other side sends the correct message with changes, in pieces.  The input specifies the changes and the sizes of
 * the pieces.
 */
#include <stdio.h>

#include "../../farandole/native/handshake.c"

#define RANKS 3

static unsigned long long handshakes; /* in all inputs */
static const unsigned char *input;
static size_t left;

static unsigned next(void)
{
    if (!left) return 0;
    left--;
    return *input++;
}

/* Changes a message as the input specifies; returns whether the message is the same as before. */
static bool change(void *message, size_t bytes)
{
    char original[sizeof(struct response)];
    memcpy(original, message, bytes);
    for (unsigned changes = next() % 4; changes; changes--) {
        const unsigned place = next() % (unsigned)bytes;
        ((unsigned char *)message)[place] ^= (unsigned char)next();
    }
    return memcmp(original, message, bytes) == 0;
}

/* Sends a message in pieces, and lets the other side read after each; the last byte may be missing, and the connection may end
 * before the other side reads. */
static void deliver(int *socket, const void *message, size_t bytes, void (*read_it)(void))
{
    const unsigned kind = next();
    const bool truncated = kind & 1, reads_early = kind & 2, closes = (kind & 12) == 4, ends = (kind & 12) == 8;
    if (truncated) bytes -= smaller(bytes, kind >> 4);
    if (reads_early) read_it(); /* nothing has arrived yet */
    for (size_t sent = 0, piece; sent < bytes; sent += piece) {
        piece = closes ? bytes : smaller(1 + next(), bytes - sent);
        if (send(*socket, (const char *)message + sent, piece, MSG_NOSIGNAL) < 0) return;
        if (!closes) read_it();
    }
    if (ends) shutdown(*socket, SHUT_WR);
    if (closes) {
        close(*socket); /* an error for the other side if data is unread */
        *socket = -1;
        read_it();
    }
    read_it();
}

static struct frd_endpoint endpoint;
static struct peer peers[RANKS];
static struct connection connections[RANKS];
static struct tcp_state tcp;

/* ---- this process accepts ---- */

static struct handshake *under_way;

static void serve(void) { on_handshake(&endpoint, under_way); } /* also after it has ended, as an event may come late */

static void accept_one(void)
{
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair)) abort();
    struct handshake *handshake = challenge(&tcp, pair[0]);
    if (!handshake) abort();
    tcp.handshakes = under_way = handshake;
    tcp.handshake_count = 1;
    struct challenge received;
    size_t moved = 0;
    struct handshake other = {.socket = -1};
    if (next() % 2) { /* a later handshake */
        other.next = handshake;
        tcp.handshakes = &other;
    }
    if (read_message(pair[1], &received, sizeof received, &moved) != COMPLETE) abort();
    if (next() % 8 == 0 && !send_message(pair[0], &received, sizeof received)) abort(); /* unread data would cause an error */
    const int rank = (int)next() % 5 - 1;
    struct response response = {.magic = MAGIC, .rank = rank, .ranks = RANKS};
    for (int i = 0; i < NONCE_BYTES; i++) response.nonce[i] = (unsigned char)next();
    prove(&tcp, false, rank, 0, RANKS, &tcp.listens_at, received.nonce, response.nonce, response.proof);
    const bool valid = change(&response, sizeof response) && (rank == 1 || rank == 2);
    if (is_rank(rank, RANKS) && next() % 8 == 0) connections[rank].in = 0; /* the rank has connected before */
    const bool first = is_rank(rank, RANKS) && connections[rank].in < 0;
    deliver(&pair[1], &response, sizeof response, serve);
    for (int r = 1; r < RANKS; r++) {
        if (connections[r].in <= 0) continue;
        if (!valid || !first || r != rank) abort(); /* accepted without a proof */
        close(connections[r].in);
    }
    if (pair[1] >= 0) close(pair[1]);
    if (tcp.handshakes == &other) tcp.handshakes = other.next;
    if (tcp.handshakes) {
        close(pair[0]);
        forget_handshake(&tcp, tcp.handshakes);
    }
}

/* ---- this process connects ---- */

static void connect_on(void) { continue_connecting(&peers[1], EPOLLIN); }

static void connect_one(void)
{
    struct connection *c = &connections[1];
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair)) abort();
    c->out = pair[0];
    c->state = CONNECTING;
    if (next() % 8 == 0 && send_message(c->out, "?", 1)) { /* the other side has refused, with an error */
        close(pair[1]);
        pair[1] = -1;
    }
    continue_connecting(&peers[1], next() % 8 ? EPOLLOUT : EPOLLIN);
    if (pair[1] < 0) {
        if (c->state == CONNECTED) abort();
        close(c->out);
        return;
    }
    struct challenge sent = {.magic = MAGIC};
    const bool challenged = change(&sent, sizeof sent.magic);
    deliver(&pair[1], &sent, sizeof sent, connect_on);
    struct response response;
    size_t moved = 0;
    unsigned char proof[PROOF_BYTES] = {0};
    const bool responded = pair[1] >= 0 && read_message(pair[1], &response, sizeof response, &moved) == COMPLETE;
    if (responded && !challenged) abort();
    if (responded) prove(&tcp, true, 0, 1, RANKS, &c->address, sent.nonce, response.nonce, proof);
    const bool valid = change(proof, sizeof proof);
    if (pair[1] >= 0) deliver(&pair[1], proof, sizeof proof, connect_on);
    if (c->state == CONNECTED && (!valid || !responded)) abort(); /* data would go to a process without the key */
    close(pair[0]);
    if (pair[1] >= 0) close(pair[1]);
}

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t bytes)
{
    static struct process_block block;
    input = data;
    left = bytes;
    handshakes++;
    if (!tcp.events) tcp.events = epoll_create1(EPOLL_CLOEXEC);
    endpoint = (struct frd_endpoint){.rank = 0, .ranks = RANKS, .peers = peers, .block = &block, .tcp = &tcp};
    tcp.timeout = 30;
    tcp.listens_at.ss_family = next() % 2 ? AF_INET : AF_INET6;
    for (int r = 0; r < RANKS; r++) {
        connections[r] = (struct connection){.in = -1, .out = -1};
        connections[r].address.ss_family = AF_INET;
        peers[r] = (struct peer){.endpoint = &endpoint, .rank = r, .connection = r ? &connections[r] : NULL};
    }
    for (int i = 0; i < FRD_KEY_BYTES; i++) tcp.key[i] = (unsigned char)i;
    if (next() % 2) accept_one();
    else connect_one();
    return 0;
}

__attribute__((destructor)) static void report(void) { fprintf(stderr, "frames: %llu\n", handshakes); }
