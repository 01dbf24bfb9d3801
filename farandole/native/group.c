/* Joining and leaving a group: the shared segment, and what each rank keeps beside it. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "internal.h"

int frd_abi(void) { return FRD_ABI; }

static size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

struct map {
    size_t lines, pairs, stages, rings, bytes;
};

static struct map map_of(int ranks)
{
    const size_t n = (size_t)ranks, page = 4096;
    struct map m;
    m.lines = round_up(sizeof(struct header), page);
    m.pairs = round_up(m.lines + n * sizeof(struct rank_line), page);
    m.stages = round_up(m.pairs + sizeof(struct pair_table), page);
    m.rings = m.stages + n * sizeof(struct stage);
    m.bytes = round_up(m.rings + n * n * sizeof(struct ring), page);
    return m;
}

/* Most of it is never touched, and so never takes memory. */
size_t frd_segment_bytes(int ranks) { return map_of(ranks).bytes; }

struct frd_group *frd_join(int descriptor, int rank, int ranks, const int *process_descriptors)
{
    const struct map m = map_of(ranks);
    char *segment = mmap(NULL, m.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (segment == MAP_FAILED) return NULL;
    struct frd_group *g = calloc(1, sizeof *g);
    if (!g) {
        munmap(segment, m.bytes);
        return NULL;
    }
    g->rank = rank;
    g->ranks = ranks;
    g->segment = segment;
    g->header = (struct header *)segment;
    g->lines = (struct rank_line *)(segment + m.lines);
    g->pairs = (struct pair_table *)(segment + m.pairs);
    g->stages = (struct stage *)(segment + m.stages);
    g->rings = (struct ring *)(segment + m.rings);
    g->timeout = 1800;
    pthread_mutex_init(&g->region_lock, NULL);
    pthread_mutex_init(&g->mail.lock, NULL);
    pthread_cond_init(&g->mail.work, NULL);
    memcpy(g->process_descriptors, process_descriptors, (size_t)ranks * sizeof(int));
    if (mail_open(g, rank, ranks, NULL)) {
        frd_close(g);
        return NULL;
    }
    return g;
}

int frd_span(struct frd_group *g, int rank, int ranks, const int *local_of)
{
    return mail_open(g, rank, ranks, local_of);
}

void frd_announce(struct frd_group *g, int64_t pid)
{
    g->lines[g->rank].life.pid = pid;
    atomic_store(&g->lines[g->rank].life.state, PRESENT);
}

void frd_leave(struct frd_group *g, const char *note)
{
    struct rank_line *line = &g->lines[g->rank];
    if (atomic_load(&line->life.state) == GONE) return;
    strncpy(line->life.note, note, FRD_NOTE_BYTES - 1);
    atomic_store(&line->life.state, GONE);
}

void frd_give_up(struct frd_group *g)
{
    frd_leave(g, "it destroyed the group");
    atomic_store(&g->given_up, true);
}

void frd_close(struct frd_group *g)
{
    mail_close(g);
    munmap(g->segment, map_of(g->ranks).bytes);
    pthread_mutex_destroy(&g->region_lock);
    free(g->regions);
    free(g);
}

void frd_set_timeout(struct frd_group *g, double seconds) { g->timeout = seconds; }

int frd_region_add(struct frd_group *g, uint64_t number, void *base, size_t stride)
{
    int status = 0;
    pthread_mutex_lock(&g->region_lock);
    if (g->region_count == g->region_capacity) {
        const int capacity = g->region_capacity ? 2 * g->region_capacity : 8;
        struct region *grown = realloc(g->regions, (size_t)capacity * sizeof *grown);
        status = grown ? 0 : -1;
        if (grown) {
            g->regions = grown;
            g->region_capacity = capacity;
        }
    }
    if (!status) g->regions[g->region_count++] = (struct region){number, base, stride};
    pthread_mutex_unlock(&g->region_lock);
    return status;
}

void frd_region_remove(struct frd_group *g, uint64_t number)
{
    pthread_mutex_lock(&g->region_lock);
    for (int i = 0; i < g->region_count; i++) {
        if (g->regions[i].number != number) continue;
        g->regions[i] = g->regions[--g->region_count];
        break;
    }
    pthread_mutex_unlock(&g->region_lock);
}

struct region find_region(struct frd_group *g, const void *data, size_t bytes)
{
    struct region found = {0, NULL, 0};
    const char *start = data;
    pthread_mutex_lock(&g->region_lock);
    for (int i = 0; i < g->region_count; i++) {
        const struct region *region = &g->regions[i];
        const char *own = region->base + (size_t)g->rank * region->stride;
        if (start >= own && start + bytes <= own + region->stride) found = *region;
    }
    pthread_mutex_unlock(&g->region_lock);
    return found;
}
