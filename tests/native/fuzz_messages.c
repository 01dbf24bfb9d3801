/* Fuzzes the parser of messages from other processes: matching.c, with a transport whose bytes come from the input.
 *
 * This process is rank 0 of 3.  Rank 1 is on another host.  Rank 2 is like a rank on this host: its large payloads wait
 * for their receive.  The input is a list of operations: frames with chosen fields, raw bytes, receives, sends, groups
 * that open and close, the end of a stream, and allocations that fail.  The entry point is libFuzzer's; `replay_corpus`
 * runs stored inputs without it.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "messages.h"

#define RANKS 3
#define STREAM ((size_t)1 << 18)
#define RECEIVES 16
#define GROUPS 3
#define LENT_BYTES ((size_t)1 << 16) /* of the arena of rank 2 */
#define LARGEST 96

static unsigned long long frames; /* opened by the parser, in all inputs */

/* ---- allocations of matching.c, which is compiled with these names ---- */

static bool no_memory;
#define MEMORY ((size_t)1 << 28)

void *fuzz_malloc(size_t bytes) { return no_memory || bytes > MEMORY ? NULL : malloc(bytes); }
void *fuzz_calloc(size_t count, size_t bytes) { return no_memory ? NULL : calloc(count, bytes); }

/* ---- the transport ---- */

static struct stream {
    char data[STREAM];
    size_t begin, end;
    size_t lets_through;         /* bytes that may be sent to the peer */
    bool ended, refused;
} streams[RANKS];

static size_t put(struct peer *peer, const char *data, size_t bytes, bool more)
{
    struct stream *s = &streams[peer->rank];
    const size_t moved = smaller(bytes, s->lets_through);
    volatile char last = bytes ? data[moved ? moved - 1 : 0] : 0; /* it must be readable */
    (void)last;
    (void)more;
    s->lets_through -= moved;
    return moved;
}

static size_t take(struct peer *peer, char *data, size_t bytes)
{
    struct stream *s = &streams[peer->rank];
    const size_t moved = smaller(bytes, s->end - s->begin);
    memcpy(data, s->data + s->begin, moved);
    s->begin += moved;
    if (bytes == HEADER && moved == HEADER) frames++;
    return moved;
}

static void nothing(struct peer *peer) { (void)peer; }
static void refuse_bytes(struct peer *peer) { streams[peer->rank].refused = true; }
static bool has_ended(const struct peer *peer, bool sends)
{
    return !sends && (streams[peer->rank].ended || streams[peer->rank].refused);
}

static const struct transport
    streamed = {put, take, nothing, nothing, nothing, refuse_bytes, false, has_ended},
    offering = {put, take, nothing, nothing, nothing, refuse_bytes, true, has_ended};

static void feed(int rank, const void *data, size_t bytes)
{
    struct stream *s = &streams[rank];
    if (s->begin == s->end) s->begin = s->end = 0;
    bytes = smaller(bytes, STREAM - s->end);
    if (data) memcpy(s->data + s->end, data, bytes);
    else memset(s->data + s->end, 0x5a, bytes);
    s->end += bytes;
}

/* ---- the input ---- */

static const unsigned char *input;
static size_t left;

static unsigned next(void)
{
    if (!left) return 0;
    left--;
    return *input++;
}

static const int types[] = {4 << 8 | 1, 1 << 8 | 5, 8 << 8 | 2, 0, 3, 1 << 24 | 4 << 8};
static const uint64_t contexts[] = {7, 7, 7, 7 + CONTEXTS, 8, 99};
static const uint64_t sizes[] = {0, 4, 8, 16, 64, 96, 4096, 5 << 20, (uint64_t)1 << 47, UINT64_MAX - 31, UINT64_MAX};
#define PICK(list) list[next() % (sizeof list / sizeof *list)]

static void read_frame(void)
{
    const int rank = 1 + (int)next() % 2;
    struct header h = {.kind = next() % 9};
    h.bytes = PICK(sizes);
    h.type = (uint32_t)PICK(types);
    h.context = PICK(contexts);
    const unsigned fields = next();
    h.source = fields & 8 ? (int)(fields % 8) - 2 : rank;
    h.tag = (int)(fields >> 4) % 4 - 1;
    h.number = next() % 8;
    const unsigned place = next();
    h.place = place & 1 ? 0 : (uint64_t)place << 8 | (place & 2 ? (uint64_t)place << 40 : 0);
    feed(rank, &h, HEADER);
    if (h.kind == EAGER || h.kind == PAYLOAD) feed(rank, NULL, smaller(h.bytes, fields & 1 ? 7 : STREAM));
}

/* ---- a run ---- */

static struct frd_endpoint *e;
static struct frd_group *groups[GROUPS];
static struct {
    struct frd_message *message;
    struct frd_group *group;
    char *data;
} receives[RECEIVES];
static char lent[LENT_BYTES];

static void open_group(int number)
{
    if (groups[number]) return;
    const uint64_t block = frd_group_reserve();
    const int members[RANKS] = {0, 1, 2};
    const uint64_t blocks[RANKS] = {block, 0, 0};
    groups[number] = frd_group_open(e, contexts[number + 2], 0, number == 1 ? 2 : RANKS, members, blocks);
    if (!groups[number]) abort();
}

static void forget(int number)
{
    free(receives[number].data);
    receives[number].message = NULL;
    receives[number].data = NULL;
}

static void close_group(int number)
{
    if (!groups[number]) return;
    for (int i = 0; i < RECEIVES; i++) {
        if (!receives[i].message || receives[i].group != groups[number]) continue;
        frd_message_cancel(groups[number], receives[i].message);
        forget(i);
    }
    frd_close(groups[number]);
    groups[number] = NULL;
}

static void post(bool sends)
{
    struct frd_group *g = groups[next() % GROUPS];
    int slot = 0;
    while (slot < RECEIVES && receives[slot].message) slot++;
    const unsigned fields = next();
    const int peer = (int)(fields % 4) - (sends ? 0 : 1), tag = (int)(fields >> 2) % 4 - 1;
    const int type = types[(fields >> 4) % 3];
    size_t bytes = sizes[(fields >> 6) + 1 + next() % 3];
    if (sends && next() % 4 == 0) bytes = EAGER_BYTES + 1;
    if (!g || slot == RECEIVES || peer == 0 || peer >= g->group_ranks) return;
    char *data = malloc(bytes ? bytes : 1);
    memset(data, 1, bytes ? bytes : 1);
    struct frd_message *m = sends ? frd_post_send(g, data, bytes, type, peer, tag) : frd_post_recv(g, data, bytes, type, peer, tag);
    receives[slot].data = data;
    receives[slot].message = m;
    receives[slot].group = g;
    if (m < (struct frd_message *)256) forget(slot); /* complete, or refused */
}

static void test(int number, bool cancels)
{
    if (!receives[number].message) return;
    if (cancels) {
        frd_message_cancel(receives[number].group, receives[number].message);
        forget(number);
    } else if (frd_message_test(receives[number].group, receives[number].message) != FRD_PENDING) {
        forget(number);
    }
}

static void step(void)
{
    const unsigned operation = next() % 14, argument = next();
    const int rank = 1 + (int)(argument % 2);
    switch (operation) {
    case 0: case 1: case 2: case 3: read_frame(); break;
    case 4: {
        char raw[LARGEST];
        const size_t bytes = argument % LARGEST;
        for (size_t i = 0; i < bytes; i++) raw[i] = (char)next();
        feed(rank, raw, bytes);
        break;
    }
    case 5: post(false); return;
    case 6: post(true); return;
    case 7: test((int)(argument % RECEIVES), false); return;
    case 8: test((int)(argument % RECEIVES), true); return;
    case 9: open_group((int)(argument % GROUPS)); break;
    case 10: close_group((int)(argument % GROUPS)); break;
    case 11: streams[rank].lets_through = argument % 3 ? STREAM : argument; push(&e->peers[rank]); break;
    case 12: {
        struct frd_message *m = receives[argument % RECEIVES].message;
        no_memory = argument & 64;
        if (m && atomic_load(&m->status) == FRD_PENDING) buffer_unexpected(m);
        break;
    }
    case 13: no_memory = argument & 2; break;
    }
    pull(&e->peers[rank]);
    pull(&e->peers[3 - rank]);
    no_memory = false;
}

static void open_arena(void)
{
    const int descriptor = memfd_create("fuzz", MFD_CLOEXEC);
    const size_t bytes = (size_t)64 << 20;
    if (descriptor < 0 || ftruncate(descriptor, (off_t)bytes) || frd_arena_open(descriptor, bytes)) abort();
}

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t bytes)
{
    static bool open;
    if (!open) open_arena();
    open = true;
    input = data;
    left = bytes;
    for (int r = 0; r < RANKS; r++) streams[r] = (struct stream){.begin = 0};
    e = frd_endpoint_open(0, RANKS);
    if (!e || frd_endpoint_add(e, 0, -1, (size_t)64 << 20, frd_endpoint_block(e), getpid())) abort();
    e->thread_runs = true; /* none does: this thread moves all messages */
    e->peers[1].transport = &streamed;
    e->peers[2].transport = &offering;
    e->peers[2].arena = lent;
    e->peers[2].arena_bytes = sizeof lent;
    open_group(0);
    while (left) step();
    for (int g = 0; g < GROUPS; g++) close_group(g);
    e->thread_runs = false;
    e->peers[2].arena = NULL;
    frd_endpoint_close(e);
    return 0;
}

__attribute__((destructor)) static void report(void) { fprintf(stderr, "frames: %llu\n", frames); }
