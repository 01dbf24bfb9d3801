/* Opening and closing a communicator. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "messages.h"

int frd_abi(void) { return FRD_ABI; }

/* Groups that this process has closed and some peer has not closed.  The peer may still read this rank's line. */
static struct frd_group *closing;
static pthread_mutex_t closing_lock = PTHREAD_MUTEX_INITIALIZER;

bool has_gone(const struct local_rank *rank)
{
    const struct rank_line *line = &rank->block->line;
    return atomic_load(&line->life.nonce) != rank->nonce || atomic_load(&line->life.state) == GONE ||
           !is_alive(rank->peer);
}

static void free_group(struct frd_group *g)
{
    forget_stages_of(g);
    frd_group_unreserve(arena_offset(g->own));
    if (g->seen_broken) arena_hold(-1);
    free(g->local);
    free(g->members);
    free(g->rank_of);
    free(g);
}

void free_closed_groups(void)
{
    pthread_mutex_lock(&closing_lock);
    for (struct frd_group **list = &closing, *g = *list; g; g = *list) {
        bool all = true;
        for (int r = 0; r < g->ranks && all; r++) all = r == g->rank || has_gone(&g->local[r]);
        if (all) {
            *list = g->next;
            free_group(g);
        } else {
            list = &g->next;
        }
    }
    pthread_mutex_unlock(&closing_lock);
}

void forget_closed_groups(void)
{
    closing = NULL;
    pthread_mutex_init(&closing_lock, NULL);
}

uint64_t frd_group_reserve(void)
{
    free_closed_groups();
    struct group_block *block = arena_ready() ? arena_take(sizeof *block) : NULL;
    if (!block) return 0;
    memset(block, 0, offsetof(struct group_block, payload));
    atomic_store(&block->line.life.state, PRESENT);
    atomic_store(&block->line.life.nonce, new_nonce());
    return arena_offset(block);
}

void frd_group_unreserve(uint64_t offset)
{
    struct group_block *block = (struct group_block *)(arena_base() + offset);
    atomic_store(&block->line.life.nonce, 0);
    arena_give(block, sizeof *block);
}

struct frd_group *frd_group_open(struct frd_endpoint *e, uint64_t context, int rank, int ranks, const int *members,
                                 const uint64_t *blocks)
{
    struct frd_group *g = calloc(1, sizeof *g);
    if (!g) return NULL;
    g->members = calloc((size_t)ranks, sizeof *g->members);
    g->local = calloc((size_t)ranks, sizeof *g->local);
    g->rank_of = calloc((size_t)ranks, sizeof *g->rank_of);
    if (!g->members || !g->local || !g->rank_of) {
        free(g->members);
        free(g->local);
        free(g->rank_of);
        free(g);
        return NULL;
    }
    g->endpoint = e;
    g->context = context;
    g->group_rank = rank;
    g->group_ranks = ranks;
    frd_set_timeout(g, 1800);
    for (int r = 0; r < ranks; r++) {
        struct peer *peer = &e->peers[members[r]];
        g->members[r].peer = peer;
        g->members[r].local = -1;
        if (peer->local < 0) continue;
        struct group_block *block = (struct group_block *)(peer->arena + blocks[r]);
        g->members[r].local = g->ranks;
        g->rank_of[g->ranks] = r;
        if (r == rank) g->rank = g->ranks;
        g->local[g->ranks++] =
            (struct local_rank){.block = block, .nonce = atomic_load(&block->line.life.nonce), .peer = peer};
    }
    g->own = g->local[g->rank].block;
    g->line = &g->own->line;
    pthread_mutex_lock(&e->lock);
    g->next = e->groups[context % CONTEXTS];
    e->groups[context % CONTEXTS] = g;
    claim_early(g);
    pthread_mutex_unlock(&e->lock);
    return g;
}

/* Notifies the connected ranks of other hosts. */
static void tell_other_hosts(struct frd_group *g, enum header_kind kind, int culprit)
{
    pthread_mutex_lock(&g->endpoint->lock);
    for (int r = 0; r < g->group_ranks; r++)
        if (g->members[r].local < 0 && tcp_is_in_use(g->members[r].peer))
            send_control(g->members[r].peer, (struct header){.context = g->context, .kind = kind, .source = culprit});
    pthread_mutex_unlock(&g->endpoint->lock);
}

void frd_leave(struct frd_group *g, const char *note)
{
    if (atomic_load(&g->line->life.state) == GONE) return;
    strncpy(g->line->life.note, note, FRD_NOTE_BYTES - 1);
    atomic_store(&g->line->life.state, GONE);
    tell_other_hosts(g, GROUP_LEFT, g->group_rank);
}

void frd_tell_broken(struct frd_group *g)
{
    struct frd_failure failure;
    frd_get_failure(g, &failure);
    if (!g->told_broken) tell_other_hosts(g, GROUP_BROKEN, failure.culprit);
    g->told_broken = true;
}

void frd_give_up(struct frd_group *g)
{
    frd_leave(g, "it destroyed the group");
    atomic_store(&g->given_up, true);
}

void frd_close(struct frd_group *g)
{
    struct frd_endpoint *e = g->endpoint;
    frd_leave(g, "it destroyed the group");
    pthread_mutex_lock(&e->lock);
    struct frd_group **list = &e->groups[g->context % CONTEXTS];
    while (*list != g) list = &(*list)->next;
    *list = g->next;
    clear_unexpected(g);
    pthread_mutex_unlock(&e->lock);
    pthread_mutex_lock(&closing_lock);
    g->next = closing;
    closing = g;
    pthread_mutex_unlock(&closing_lock);
    free_closed_groups();
}

void frd_set_timeout(struct frd_group *g, double seconds) { g->timeout = g->call_timeout = seconds; }
void frd_set_call_timeout(struct frd_group *g, double seconds) { g->call_timeout = seconds; }
