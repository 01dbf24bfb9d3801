/* The thread pool for generation.
 *
 * A call is one parallel region for a whole sequence of operations.  Each thread starts with its own range of an
 * operation's items, so that it reads weights in order, and then takes items from the ranges of the other threads.
 * Threads wait for the completion of the items, and not for each other: a thread that wakes up late or loses its
 * processor delays at most the item that it computes.
 */
#include "team.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

#include "core.h"
#include "internal.h"

enum { MOST_THREADS = 256, SPINS = 4000 };

/* The progress of an operation: `next` has the next item of each thread's range. */
struct progress {
    atomic_size_t complete;
    atomic_size_t next[];
};

struct region {
    const struct frd_work *works;
    size_t count, threads;
    size_t progress_bytes, scratch_bytes; /* of each operation, and of each thread */
    char *progress, *scratch;
};

/* Helpers wait for a new round, and the caller waits for the helpers.  A waiting thread first spins for some
 * microseconds, and then sleeps. */
static struct {
    pthread_mutex_t busy, lock;
    pthread_cond_t changed, done;
    atomic_ulong round;
    atomic_int active;   /* helpers that work in this round */
    int helpers, wanted; /* helpers that exist, and helpers that this round can use */
    const struct region *region;
} pool = {.busy = PTHREAD_MUTEX_INITIALIZER,
          .lock = PTHREAD_MUTEX_INITIALIZER,
          .changed = PTHREAD_COND_INITIALIZER,
          .done = PTHREAD_COND_INITIALIZER};

static void compute(const struct region *region, size_t own)
{
    void *scratch = region->scratch + own * region->scratch_bytes;
    for (size_t i = 0; i < region->count; i++) {
        const struct frd_work *work = region->works + i;
        struct progress *progress = (void *)(region->progress + i * region->progress_bytes);
        size_t computed = 0;
        for (size_t offset = 0; offset < region->threads; offset++) {
            const size_t range = (own + offset) % region->threads, end = (range + 1) * work->count / region->threads;
            while (atomic_load_explicit(&progress->next[range], memory_order_relaxed) < end) {
                const size_t number = atomic_fetch_add_explicit(&progress->next[range], 1, memory_order_relaxed);
                if (number >= end) break;
                work->run(work->task, number, scratch);
                computed++;
            }
        }
        if (computed) atomic_fetch_add_explicit(&progress->complete, computed, memory_order_release);
        for (int spin = 0; atomic_load_explicit(&progress->complete, memory_order_acquire) < work->count;)
            if (spin++ < SPINS) relax();
            else sched_yield();
    }
}

static void *helper(void *argument)
{
    const int own = (int)(intptr_t)argument;
    unsigned long seen = 0;
    for (;;) {
        for (int spin = 0; spin < SPINS && atomic_load_explicit(&pool.round, memory_order_acquire) == seen; spin++)
            relax();
        pthread_mutex_lock(&pool.lock);
        while (atomic_load(&pool.round) == seen) pthread_cond_wait(&pool.changed, &pool.lock);
        seen = atomic_load(&pool.round);
        const struct region *region = own < pool.wanted ? pool.region : NULL;
        if (region) atomic_fetch_add(&pool.active, 1);
        pthread_mutex_unlock(&pool.lock);
        if (!region) continue;
        compute(region, (size_t)own + 1);
        pthread_mutex_lock(&pool.lock);
        if (atomic_fetch_sub(&pool.active, 1) == 1) pthread_cond_signal(&pool.done);
        pthread_mutex_unlock(&pool.lock);
    }
    return NULL;
}

/* A child process has no helpers. */
static void forget_helpers(void)
{
    pthread_mutex_init(&pool.busy, NULL);
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.changed, NULL);
    pthread_cond_init(&pool.done, NULL);
    pool.helpers = pool.wanted = 0;
    atomic_store(&pool.active, 0);
    pool.region = NULL;
}

/* Wakes helpers up, or creates them, for a region. */
static void begin(const struct region *region)
{
    pthread_mutex_lock(&pool.lock);
    static int registered;
    if (!registered) registered = !pthread_atfork(NULL, NULL, forget_helpers);
    const int wanted = (int)region->threads - 1;
    while (pool.helpers < wanted) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, helper, (void *)(intptr_t)pool.helpers)) break;
        pthread_detach(thread);
        pool.helpers++;
    }
    pool.region = region;
    pool.wanted = wanted;
    atomic_fetch_add(&pool.round, 1);
    pthread_cond_broadcast(&pool.changed);
    pthread_mutex_unlock(&pool.lock);
}

/* Waits for the helpers of this round.  A helper that wakes up later finds no region. */
static void end(void)
{
    for (int spin = 0; spin < SPINS && atomic_load_explicit(&pool.active, memory_order_acquire); spin++) relax();
    pthread_mutex_lock(&pool.lock);
    pool.region = NULL;
    while (atomic_load(&pool.active)) pthread_cond_wait(&pool.done, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
}

int frd_run(const struct frd_work *works, size_t count, int threads)
{
    struct region region = {.works = works, .count = count};
    size_t most = 0;
    for (size_t i = 0; i < count; i++) {
        most = works[i].count > most ? works[i].count : most;
        const size_t scratch = (works[i].scratch_bytes + 63) / 64 * 64;
        region.scratch_bytes = scratch > region.scratch_bytes ? scratch : region.scratch_bytes;
    }
    region.threads = threads < 1 ? 1 : threads > MOST_THREADS ? MOST_THREADS : (size_t)threads;
    if (region.threads > most) region.threads = most ? most : 1;
    const bool helped = region.threads > 1 && !pthread_mutex_trylock(&pool.busy);
    if (!helped) region.threads = 1;
    region.progress_bytes = sizeof(struct progress) + region.threads * sizeof(atomic_size_t);
    region.progress = malloc(count * region.progress_bytes + region.threads * region.scratch_bytes + 64);
    if (region.progress) {
        const uintptr_t behind = (uintptr_t)region.progress + count * region.progress_bytes;
        region.scratch = (char *)((behind + 63) / 64 * 64);
        for (size_t i = 0; i < count; i++) {
            struct progress *progress = (void *)(region.progress + i * region.progress_bytes);
            atomic_init(&progress->complete, 0);
            for (size_t own = 0; own < region.threads; own++)
                atomic_init(&progress->next[own], own * works[i].count / region.threads);
        }
        if (helped) begin(&region);
        compute(&region, 0);
        if (helped) end();
    }
    if (helped) pthread_mutex_unlock(&pool.busy);
    const bool done = region.progress;
    free(region.progress);
    return done ? FRD_OK : FRD_NO_MEMORY;
}
