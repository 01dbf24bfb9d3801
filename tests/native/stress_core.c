/* The C core under load, without Python: for builds with sanitizers.
 *
 *     stress RANKS HOSTS SECONDS SEED
 *
 * starts RANKS processes on this machine, as if on HOSTS hosts.  In each epoch they open an endpoint, and two threads of each
 * process run random operations, each on groups of its own: collectives, messages of all sizes in different orders, receives
 * that are given up, groups that close.  All ranks draw the same operations from a seed, and every result is checked by formula.
 * In the last epoch a process ends in the middle, and the others must find out.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "internal.h"

#define MAX_RANKS 8
#define THREADS 2
#define ARENA ((size_t)256 << 20)
#define LONGEST 40000 /* elements */
#define OPERATIONS 60 /* on one group */
#define TIMEOUT_S 60.0

/* A staging slot may pass from one thread's group to another's after a peer has finished with it.  ThreadSanitizer does not see
 * the accesses of the peer, which is another process.  With ThreadSanitizer, therefore, only one thread makes collective calls. */
#ifdef __SANITIZE_THREAD__
#define DIVIDED true
#else
#define DIVIDED false
#endif
#define FLOAT (4 << 8 | FRD_F32)

static int ranks, hosts, rank;
static uint64_t seed;

/* Data that the processes share before they have groups. */
static struct shared {
    _Atomic int arrived;
    int descriptors[MAX_RANKS];
    pid_t pids[MAX_RANKS];
    uint64_t blocks[MAX_RANKS][THREADS + 1];
    uint16_t ports[MAX_RANKS];
    _Atomic int waiting[THREADS];
    _Atomic unsigned long long operations;
    _Atomic bool over;
} *shared;

static void fail(const char *format, ...)
{
    va_list values;
    va_start(values, format);
    fprintf(stderr, "rank %d: ", rank);
    vfprintf(stderr, format, values);
    fprintf(stderr, "\n");
    va_end(values);
    _exit(1);
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static uint64_t draw(uint64_t *state)
{
    *state += 0x9e3779b97f4a7c15u; /* splitmix64 */
    uint64_t x = *state;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/* All processes, or the same thread of all processes. */
static void wait_for_all(_Atomic int *count, int expected)
{
    const double deadline = now() + TIMEOUT_S;
    const int round = (atomic_fetch_add(count, 1) / expected + 1) * expected;
    while (atomic_load(count) < round) {
        if (now() > deadline) fail("the other processes do not come");
        usleep(100);
    }
}

static int host_of(int r) { return r * hosts / ranks; }

/* ---- the operations ---- */

struct worker {
    struct frd_group *group;
    int number;                  /* of the thread */
    uint64_t random;             /* the same on all ranks */
    float *in, *out;
    bool survives;               /* the last epoch: a failure is expected */
};

static float value(int r, size_t i, uint64_t salt) { return (float)((r * 7 + (int)(i % 13) + (int)(salt % 5)) % 32); }

static bool check(struct worker *w, int status)
{
    if (status == FRD_OK) return true;
    if (!w->survives) fail("thread %d: a call returned %d", w->number, status);
    return false;
}

static void expect(const struct worker *w, const char *what, float found, float expected, size_t place)
{
    if (found != expected) fail("thread %d: %s: %g at %zu, expected %g", w->number, what, (double)found, place, (double)expected);
}

static size_t length(struct worker *w)
{
    const uint64_t kind = draw(&w->random) % 4;
    return draw(&w->random) % (kind == 0 ? 8 : kind == 1 ? 600 : LONGEST) + (kind > 1);
}

/* Collectives run among the ranks of a host. */
static bool collective(struct worker *w)
{
    struct frd_group *g = w->group;
    const int n = g->ranks, own = g->rank, flags = draw(&w->random) % 2 ? FRD_BACKGROUND : 0;
    const int first = g->group_rank - own, root = (int)(draw(&w->random) % (uint64_t)n);
    const uint64_t salt = draw(&w->random), operation = draw(&w->random) % 8;
    const size_t count = length(w) / (operation >= 4 ? (size_t)n : 1);
    float *in = w->in, *out = w->out;
    for (size_t i = 0; i < count * (size_t)n; i++) in[i] = value(g->group_rank, i, salt);
    switch (operation) {
    case 0: return check(w, frd_barrier(g, flags));
    case 1:
        if (!check(w, frd_all_reduce(g, in, count, FLOAT, FRD_SUM, flags))) return false;
        for (size_t i = 0; i < count; i++) {
            float sum = 0;
            for (int r = 0; r < n; r++) sum += value(first + r, i, salt);
            expect(w, "all_reduce", in[i], sum, i);
        }
        return true;
    case 2:
        if (!check(w, frd_broadcast(g, in, count, FLOAT, root, flags))) return false;
        for (size_t i = 0; i < count; i++) expect(w, "broadcast", in[i], value(first + root, i, salt), i);
        return true;
    case 3:
        if (!check(w, frd_scan(g, in, out, count, FLOAT, FRD_MAX, 0, flags))) return false;
        for (size_t i = 0; i < count; i++) {
            float most = value(first, i, salt);
            for (int r = 1; r <= own; r++) most = value(first + r, i, salt) > most ? value(first + r, i, salt) : most;
            expect(w, "scan", out[i], most, i);
        }
        return true;
    case 4:
        if (!check(w, frd_all_gather_even(g, in, out, count, FLOAT, flags))) return false;
        for (size_t i = 0; i < count * (size_t)n; i++)
            expect(w, "all_gather", out[i], value(first + (int)(i / count), i % count, salt), i);
        return true;
    case 5:
        if (!check(w, frd_all_to_all_even(g, in, out, count, FLOAT, flags))) return false;
        for (size_t i = 0; i < count * (size_t)n; i++)
            expect(w, "all_to_all", out[i], value(first + (int)(i / count), (size_t)own * count + i % count, salt), i);
        return true;
    case 6:
        if (!check(w, frd_reduce_scatter_even(g, in, out, count, FLOAT, FRD_SUM, flags))) return false;
        for (size_t i = 0; i < count; i++) {
            float sum = 0;
            for (int r = 0; r < n; r++) sum += value(first + r, (size_t)own * count + i, salt);
            expect(w, "reduce_scatter", out[i], sum, i);
        }
        return true;
    default:
        if (!check(w, frd_reduce(g, in, count, FLOAT, FRD_SUM, root, flags))) return false;
        for (size_t i = 0; i < count && own == root; i++) {
            float sum = 0;
            for (int r = 0; r < n; r++) sum += value(first + r, i, salt);
            expect(w, "reduce", in[i], sum, i);
        }
        return true;
    }
}

static bool wait_for(struct worker *w, struct frd_message *m, double *deadline)
{
    if ((uintptr_t)m < FRD_LAST_STATUS) return check(w, m ? (int)(uintptr_t)m : FRD_OK);
    int outcome = FRD_PENDING;
    while (outcome == FRD_PENDING && draw(&w->random) % 3) outcome = frd_message_test(w->group, m);
    if (outcome == FRD_PENDING) outcome = frd_message_wait(w->group, m, *deadline - now(), 0);
    return check(w, outcome & 0xff);
}

/* Every rank sends to every other rank; this rank posts its sends and receives in its own random order. */
static bool messages(struct worker *w, uint64_t *order)
{
    struct frd_group *g = w->group;
    const int n = g->group_ranks, me = g->group_rank;
    const size_t count = length(w) / (size_t)n;
    const uint64_t salt = draw(&w->random), common = w->random;
    const bool from_any = draw(&w->random) % 4 == 0, sends_first = draw(order) % 2;
    struct frd_message *sends[MAX_RANKS] = {NULL}, *receives[MAX_RANKS] = {NULL}, *never = NULL;
    double deadline = now() + TIMEOUT_S;
    float unused;
    if (draw(order) % 2) never = frd_post_recv(g, &unused, sizeof unused, FLOAT, (me + 1) % n, 1000); /* never sent */
    for (int turn = 0; turn < 2; turn++) {
        for (int k = 0; k < n; k++) {
            const int peer = (me + k) % n;
            if (peer == me) continue;
            float *data = (sends_first == (turn == 0) ? w->in : w->out) + (size_t)peer * count;
            if (sends_first == (turn == 0)) {
                for (size_t i = 0; i < count; i++) data[i] = value(me * n + peer, i, salt);
                sends[peer] = frd_post_send(g, data, 4 * count, FLOAT, peer, from_any ? 20 + me : 3);
            } else {
                receives[peer] = frd_post_recv(g, data, 4 * count, FLOAT, from_any ? -1 : peer, from_any ? 20 + peer : 3);
            }
        }
    }
    bool all = true;
    for (int k = 1; k < n; k++) all = wait_for(w, receives[(me + n - k) % n], &deadline) && all;
    for (int k = 1; k < n; k++) all = wait_for(w, sends[(me + k) % n], &deadline) && all;
    if ((uintptr_t)never >= FRD_LAST_STATUS) frd_message_cancel(g, never);
    for (int peer = 0; peer < n && all; peer++)
        for (size_t i = 0; i < count && peer != me; i++)
            expect(w, "message", w->out[(size_t)peer * count + i], value(peer * n + me, i, salt), i);
    w->random = common; /* `wait_for` has drawn as often as this rank had to wait */
    return all;
}

/* ---- an epoch ---- */

static struct frd_endpoint *endpoint;

static struct frd_group *open_group(int thread, uint64_t context, uint64_t block)
{
    int members[MAX_RANKS];
    uint64_t blocks[MAX_RANKS];
    for (int r = 0; r < ranks; r++) members[r] = r;
    shared->blocks[rank][thread] = block;
    wait_for_all(&shared->waiting[thread], ranks);
    for (int r = 0; r < ranks; r++) blocks[r] = shared->blocks[r][thread];
    wait_for_all(&shared->waiting[thread], ranks);
    struct frd_group *g = frd_group_open(endpoint, context, rank, ranks, members, blocks);
    if (!g) fail("no memory for a group");
    frd_set_timeout(g, TIMEOUT_S);
    return g;
}

struct task {
    int thread, groups, victim;  /* victim: -1, or the rank that ends in the first group */
    uint64_t epoch;
};

static void *work(void *argument)
{
    const struct task *task = argument;
    struct worker w = {.number = task->thread, .random = seed ^ task->epoch << 20 ^ (uint64_t)task->thread << 50,
                       .survives = task->victim >= 0};
    uint64_t order = w.random ^ (uint64_t)rank << 8;
    const bool lies_in_arena = draw(&order) % 2;
    const size_t bytes = 4 * (LONGEST + 1) * MAX_RANKS;
    w.in = lies_in_arena ? frd_alloc(bytes) : malloc(bytes);
    w.out = lies_in_arena ? frd_alloc(bytes) : malloc(bytes);
    if (!w.in || !w.out) fail("no memory");
    for (int i = 0; i < task->groups; i++) {
        w.group = open_group(task->thread, task->epoch << 16 | (uint64_t)task->thread << 8 | (uint64_t)(i + 1), frd_group_reserve());
        bool whole = true;
        for (int o = 0; o < OPERATIONS && whole; o++) {
            if (task->victim == rank && task->thread == 0 && o == OPERATIONS / 2) _exit(7);
            const bool collects = DIVIDED && !w.survives ? task->thread == 0 : draw(&w.random) % 2;
            whole = collects ? collective(&w) : messages(&w, &order);
            atomic_fetch_add(&shared->operations, 1);
        }
        if (w.survives && whole && rank != task->victim && task->thread == 0) fail("did not notice that rank %d ended", task->victim);
        if (!whole) frd_tell_broken(w.group);
        frd_close(w.group);
    }
    if (lies_in_arena) frd_free(w.in), frd_free(w.out);
    else free(w.in), free(w.out);
    return NULL;
}

/* ---- a queue of calls ---- */

#define TICKETS 2000

static _Atomic int calls_left;

static void *serve_tickets(void *tickets)
{
    while (frd_tickets_wait(tickets)) {
        frd_tickets_take(tickets);
        atomic_fetch_sub(&calls_left, 1);
    }
    return NULL;
}

/* One thread posts calls, and another runs them. */
static void run_tickets(void)
{
    struct frd_tickets *tickets = frd_tickets_new();
    pthread_t server;
    uint64_t order = seed ^ (uint64_t)rank;
    if (!tickets || pthread_create(&server, NULL, serve_tickets, tickets)) fail("no queue");
    atomic_store(&calls_left, TICKETS);
    for (int i = 0; i < TICKETS; i++) {
        frd_tickets_post(tickets);
        if (draw(&order) % 100 == 0) usleep(200);
    }
    const double deadline = now() + TIMEOUT_S;
    while (atomic_load(&calls_left) > 0) {
        if (now() > deadline) fail("%d calls were not run", atomic_load(&calls_left));
        usleep(100);
    }
    frd_tickets_close(tickets);
    pthread_join(server, NULL);
    frd_tickets_free(tickets);
}

/* ---- the processes ---- */

static void open_endpoint(void)
{
    const struct in_addr loopback = {htonl(INADDR_LOOPBACK)};
    const unsigned char key[FRD_KEY_BYTES] = "the key of this job, 32 bytes..";
    endpoint = frd_endpoint_open(rank, ranks);
    if (!endpoint) fail("no memory for the endpoint");
    shared->blocks[rank][THREADS] = frd_endpoint_block(endpoint);
    int listener = -1;
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr = loopback};
    socklen_t bytes = sizeof at;
    if (hosts > 1) {
        listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
        if (listener < 0 || bind(listener, (struct sockaddr *)&at, sizeof at) || listen(listener, ranks)) fail("cannot listen");
        getsockname(listener, (struct sockaddr *)&at, &bytes);
        shared->ports[rank] = at.sin_port;
    }
    wait_for_all(&shared->arrived, ranks);
    for (int r = 0; r < ranks; r++) {
        if (host_of(r) == host_of(rank) &&
            frd_endpoint_add(endpoint, r, r == rank ? -1 : shared->descriptors[r], ARENA, shared->blocks[r][THREADS], shared->pids[r]))
            fail("cannot map the arena of rank %d", r);
    }
    if (hosts > 1) {
        const struct sockaddr_in own = {.sin_family = AF_INET, .sin_addr = loopback};
        if (frd_tcp_open(endpoint, listener, &own, sizeof own, key, TIMEOUT_S)) fail("no memory for TCP");
        for (int r = 0; r < ranks; r++) {
            at.sin_port = shared->ports[r];
            if (host_of(r) != host_of(rank) && frd_tcp_add(endpoint, r, &at, sizeof at)) fail("no memory for a connection");
        }
        if (frd_tcp_start(endpoint)) fail("no progress thread");
    }
    wait_for_all(&shared->arrived, ranks);
}

static void run_epoch(uint64_t epoch, int victim)
{
    pthread_t threads[THREADS];
    struct task tasks[THREADS];
    open_endpoint();
    const int running = victim >= 0 ? 1 : THREADS;
    for (int t = 0; t < running; t++) {
        tasks[t] = (struct task){t, victim >= 0 ? 1 : 3, victim, epoch};
        if (pthread_create(&threads[t], NULL, work, &tasks[t])) fail("no thread");
    }
    for (int t = 0; t < running; t++) pthread_join(threads[t], NULL);
    frd_endpoint_close(endpoint);
}

static int run_rank(double seconds)
{
    if (frd_arena_open(shared->descriptors[rank], ARENA)) fail("no arena");
    shared->pids[rank] = getpid();
    wait_for_all(&shared->arrived, ranks);
    run_tickets();
    const double end = now() + seconds;
    uint64_t epoch = 1;
    do {
        run_epoch(epoch++, -1);
        if (rank == 0) shared->over = now() > end;
        wait_for_all(&shared->arrived, ranks);
    } while (!shared->over);
    run_epoch(epoch, (int)(seed % (uint64_t)ranks));
    return 0;
}

int main(int count, char **words)
{
    if (count != 5 || (ranks = atoi(words[1])) < 2 || ranks > MAX_RANKS || (hosts = atoi(words[2])) < 1 || hosts > ranks) {
        fprintf(stderr, "usage: stress RANKS HOSTS SECONDS SEED; 2 to %d ranks\n", MAX_RANKS);
        return 2;
    }
    seed = strtoull(words[4], NULL, 10);
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    for (int r = 0; r < ranks; r++) {
        shared->descriptors[r] = memfd_create("stress", 0);
        if (shared->descriptors[r] < 0 || ftruncate(shared->descriptors[r], (off_t)ARENA)) fail("no memory file");
    }
    pid_t pids[MAX_RANKS];
    for (rank = 0; rank < ranks; rank++)
        if ((pids[rank] = fork()) == 0) exit(run_rank(atof(words[3])));
    int failed = 0;
    for (int r = 0; r < ranks; r++) {
        int status = 0;
        waitpid(pids[r], &status, 0);
        const int expected = r == (int)(seed % (uint64_t)ranks) ? 7 : 0;
        if (!WIFEXITED(status) || WEXITSTATUS(status) != expected) {
            fprintf(stderr, "rank %d ended with status %d\n", r, status);
            failed = 1;
        }
    }
    printf("%llu operations of %d ranks on %d hosts\n", (unsigned long long)shared->operations, ranks, hosts);
    return failed;
}
