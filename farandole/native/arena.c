/* The shared memory of this process: one memory file, which the other processes of the host map once.
 *
 * The file is much larger than the memory that is ever used; only touched pages take memory.  The records of the
 * allocator are private.  Whole free pages are returned to the system, except the pages of recently freed buffers: the
 * system would have to clear these pages again, which takes longer than filling them.
 *
 * After a group has failed, a peer may still copy from or to a buffer that its owner has freed.  Freed memory is
 * therefore held back (`arena_hold`) until every rank of the failed group has left the group or ended.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "internal.h"

#define PAGE ((size_t)4096)
#define KEPT_BYTES ((size_t)1 << 26) /* maximum total size of freed buffers that keep their pages */

struct extent {
    size_t offset, bytes;
};

struct extents {
    struct extent *list; /* sorted, except `kept`; free extents are not adjacent */
    int count, capacity;
};

static struct {
    pthread_mutex_t lock;
    pid_t process;
    char *base;
    size_t bytes, used;
    struct extents free;
    struct extents held;  /* freed while `holds` > 0 */
    struct extents given; /* allocated by frd_alloc; contains the size at each offset */
    struct extents kept;  /* freed by frd_free, but with their pages kept; oldest first */
    size_t kept_bytes;
    int holds;
} arena = {.lock = PTHREAD_MUTEX_INITIALIZER};

bool arena_ready(void) { return arena.base && arena.process == getpid(); }
size_t frd_arena_bytes(void) { return arena_ready() ? arena.bytes : 0; }
size_t frd_arena_used(void) { return arena.used; }
char *arena_base(void) { return arena.base; }
uint64_t arena_offset(const void *memory) { return (uint64_t)((const char *)memory - arena.base); }

bool is_shared(const void *data, size_t bytes)
{
    const char *start = data;
    return start >= arena.base && start + bytes <= arena.base + arena.bytes && arena.base;
}

/* The first extent that starts at `offset` or later. */
static int find(const struct extents *e, size_t offset)
{
    int low = 0, high = e->count;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (e->list[middle].offset < offset) low = middle + 1;
        else high = middle;
    }
    return low;
}

static bool insert(struct extents *e, int at, struct extent extent)
{
    if (e->count == e->capacity) {
        const int capacity = e->capacity ? 2 * e->capacity : 64;
        struct extent *grown = realloc(e->list, (size_t)capacity * sizeof *grown);
        if (!grown) return false;
        e->list = grown;
        e->capacity = capacity;
    }
    memmove(e->list + at + 1, e->list + at, (size_t)(e->count++ - at) * sizeof *e->list);
    e->list[at] = extent;
    return true;
}

static void erase(struct extents *e, int at)
{
    memmove(e->list + at, e->list + at + 1, (size_t)(--e->count - at) * sizeof *e->list);
}

int frd_arena_open(int descriptor, size_t bytes)
{
    if (arena_ready()) return 0;
    void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, descriptor, 0);
    if (base == MAP_FAILED) return -errno;
    madvise(base, bytes, MADV_DONTDUMP);
    /* in a forked child the parent's arena stays mapped, because it contains the parent's tensors */
    if (arena.process) forget_closed_endpoints();
    pthread_mutex_init(&arena.lock, NULL);
    arena.base = base;
    arena.bytes = bytes;
    arena.used = 0;
    arena.holds = 0;
    arena.process = getpid();
    arena.free.count = arena.held.count = arena.given.count = arena.kept.count = 0;
    arena.kept_bytes = 0;
    /* offset 0 means none */
    return insert(&arena.free, 0, (struct extent){PAGE, bytes - PAGE}) ? 0 : -ENOMEM;
}

static size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

/* First fit.  The lock is held. */
static void *take(size_t bytes, size_t alignment)
{
    struct extents *e = &arena.free;
    for (int i = 0; i < e->count; i++) {
        const struct extent x = e->list[i];
        const size_t start = round_up(x.offset, alignment), before = start - x.offset;
        if (before + bytes > x.bytes) continue;
        const struct extent after = {start + bytes, x.bytes - before - bytes};
        if (before && after.bytes) {
            if (!insert(e, i + 1, after)) return NULL;
            e->list[i].bytes = before;
        } else if (before) {
            e->list[i].bytes = before;
        } else if (after.bytes) {
            e->list[i] = after;
        } else {
            erase(e, i);
        }
        arena.used += bytes;
        return arena.base + start;
    }
    return NULL;
}

/* Frees an extent and returns whole free pages to the system, which clears them. */
static void give(struct extent x)
{
    struct extents *e = &arena.free;
    int at = find(e, x.offset);
    struct extent whole = x;
    arena.used -= x.bytes;
    if (at < e->count && e->list[at].offset == x.offset + x.bytes) {
        whole.bytes += e->list[at].bytes;
        erase(e, at);
    }
    if (at > 0 && e->list[at - 1].offset + e->list[at - 1].bytes == x.offset) {
        whole.offset = e->list[at - 1].offset;
        whole.bytes += e->list[at - 1].bytes;
        erase(e, --at);
    }
    /* pages that have become entirely free */
    const size_t first = x.offset / PAGE * PAGE, start = first < whole.offset ? round_up(whole.offset, PAGE) : first;
    const size_t end = smaller(round_up(x.offset + x.bytes, PAGE), (whole.offset + whole.bytes) / PAGE * PAGE);
    if (end > start) madvise(arena.base + start, end - start, MADV_REMOVE);
    if (!insert(e, at, whole)) arena.used += whole.bytes; /* out of memory: the extent is never reused */
}

void *arena_take(size_t bytes)
{
    pthread_mutex_lock(&arena.lock);
    void *memory = take(round_up(bytes, LINE), LINE);
    pthread_mutex_unlock(&arena.lock);
    return memory;
}

void arena_give(void *memory, size_t bytes)
{
    pthread_mutex_lock(&arena.lock);
    const struct extent x = {arena_offset(memory), round_up(bytes, LINE)};
    if (!arena.holds || !insert(&arena.held, find(&arena.held, x.offset), x)) give(x);
    pthread_mutex_unlock(&arena.lock);
}

static void release_kept(size_t allowed)
{
    while (arena.kept_bytes > allowed) {
        arena.kept_bytes -= arena.kept.list[0].bytes;
        give(arena.kept.list[0]);
        erase(&arena.kept, 0);
    }
}

static void keep(struct extent x)
{
    if (x.bytes > KEPT_BYTES || !insert(&arena.kept, arena.kept.count, x)) {
        give(x);
        return;
    }
    arena.kept_bytes += x.bytes;
    release_kept(KEPT_BYTES);
}

/* Takes the latest kept extent that is large enough but not much too large; returns an extent of size 0 if none is. */
static struct extent take_kept(size_t bytes)
{
    for (int i = arena.kept.count - 1; i >= 0; i--) {
        const struct extent x = arena.kept.list[i];
        if (x.bytes < bytes || x.bytes > bytes + bytes / 2) continue;
        erase(&arena.kept, i);
        arena.kept_bytes -= x.bytes;
        return x;
    }
    return (struct extent){0, 0};
}

static struct extent take_pages(size_t bytes)
{
    const struct extent kept = take_kept(bytes);
    if (kept.bytes) return kept;
    void *memory = take(bytes, PAGE);
    if (!memory) {
        release_kept(0);
        memory = take(bytes, PAGE);
    }
    return memory ? (struct extent){arena_offset(memory), bytes} : (struct extent){0, 0};
}

void *frd_alloc(size_t bytes)
{
    if (!arena_ready()) return NULL;
    const size_t whole = round_up(bytes ? bytes : 1, PAGE);
    pthread_mutex_lock(&arena.lock);
    const struct extent x = take_pages(whole);
    void *memory = x.bytes ? arena.base + x.offset : NULL;
    if (memory && !insert(&arena.given, find(&arena.given, x.offset), x)) {
        give(x);
        memory = NULL;
    }
    pthread_mutex_unlock(&arena.lock);
    return memory;
}

void frd_free(void *memory)
{
    if (!arena_ready() || !is_shared(memory, 1)) return; /* in a forked child: the parent frees the memory */
    pthread_mutex_lock(&arena.lock);
    const size_t offset = arena_offset(memory);
    const int at = find(&arena.given, offset);
    struct extent x = {offset, 0};
    if (at < arena.given.count && arena.given.list[at].offset == offset) {
        x = arena.given.list[at];
        erase(&arena.given, at);
        if (!arena.holds || !insert(&arena.held, find(&arena.held, offset), x)) keep(x);
    }
    pthread_mutex_unlock(&arena.lock);
}

void arena_hold(int change)
{
    pthread_mutex_lock(&arena.lock);
    arena.holds += change;
    if (!arena.holds) {
        for (int i = 0; i < arena.held.count; i++) give(arena.held.list[i]);
        arena.held.count = 0;
    }
    pthread_mutex_unlock(&arena.lock);
}

/* ---- other processes' arenas: each is mapped once for all endpoints ---- */

struct mapping {
    struct mapping *next;
    dev_t device;
    ino_t file;
    char *base;
    size_t bytes;
    int users;
};

static struct mapping *mappings;

char *map_arena(int descriptor, size_t bytes)
{
    struct stat file;
    if (fstat(descriptor, &file)) return NULL;
    char *base = NULL;
    pthread_mutex_lock(&arena.lock);
    struct mapping *m = mappings;
    while (m && (m->device != file.st_dev || m->file != file.st_ino || m->bytes != bytes)) m = m->next;
    if (!m && (m = calloc(1, sizeof *m))) {
        base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, descriptor, 0);
        if (base != MAP_FAILED) {
            madvise(base, bytes, MADV_DONTDUMP);
            *m = (struct mapping){mappings, file.st_dev, file.st_ino, base, bytes, 0};
            mappings = m;
        } else {
            free(m);
            m = NULL;
        }
    }
    if (m) m->users++;
    base = m ? m->base : NULL;
    pthread_mutex_unlock(&arena.lock);
    return base;
}

void unmap_arena(char *base)
{
    pthread_mutex_lock(&arena.lock);
    for (struct mapping **list = &mappings, *m; (m = *list); list = &m->next) {
        if (m->base != base) continue;
        if (!--m->users) {
            *list = m->next;
            munmap(m->base, m->bytes);
            free(m);
        }
        break;
    }
    pthread_mutex_unlock(&arena.lock);
}
