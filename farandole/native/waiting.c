/* How a rank waits: spin briefly, then yield the core, then sleep until woken.
 *
 * Ranks may outnumber cores, and a rank's own computation may need the core on which its communication waits, so no
 * rank spins for long.  A sleeping rank wakes every few milliseconds to check that the other ranks are alive.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "internal.h"

#define SPINS 400
#define YIELDS 60
/* On a crowded core a rank sleeps after this many yields that run no other thread: until it sleeps, the scheduler
 * prefers the rank. */
#define IDLE_YIELDS 10
#define SLICE_S 0.010         /* longest sleep */
#define INSPECTION_S 0.050    /* between two checks of the other processes */
#define SIGNALS_S 0.050       /* between two checks for signals */
#define CROWDED_YIELD_S 5e-6  /* a yield that takes longer ran another thread */
#define CROWDED_WAITS 64      /* waits without spinning after such a yield */

double seconds_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb");
#endif
}

/* A futex is a 32-bit word: the low half of a counter. */
static const void *low_half(const _Atomic uint64_t *counter)
{
    return (const uint32_t *)(const void *)counter + (__BYTE_ORDER__ == __ORDER_BIG_ENDIAN__);
}

void futex_wait(const void *word, uint32_t value, double seconds)
{
    const struct timespec t = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    syscall(SYS_futex, word, FUTEX_WAIT, value, &t, NULL, 0);
}

void futex_wake(const void *word) { syscall(SYS_futex, word, FUTEX_WAKE, 0x7fffffff, NULL, NULL, 0); }

bool yield_core(void)
{
    const double before = seconds_now();
    sched_yield();
    return seconds_now() - before > CROWDED_YIELD_S;
}

static int (*interpreter_acquire)(void);
static void (*interpreter_release)(int);
static int (*interpreter_check)(void);
static void (*interpreter_fetch)(void **, void **, void **);
static void *pending_interrupt[3];

void frd_set_interrupts(int (*acquire)(void), void (*release)(int), int (*check)(void),
                        void (*fetch)(void **, void **, void **))
{
    interpreter_acquire = acquire;
    interpreter_release = release;
    interpreter_check = check;
    interpreter_fetch = fetch;
}

void frd_pending_interrupt(void **type, void **value, void **traceback)
{
    *type = pending_interrupt[0];
    *value = pending_interrupt[1];
    *traceback = pending_interrupt[2];
}

/* Runs the interpreter's signal handlers.  If a handler raises an exception, stores the exception and returns true. */
bool interrupted(void)
{
    if (!interpreter_check) return false;
    const int state = interpreter_acquire();
    const bool raised = interpreter_check() != 0;
    if (raised) interpreter_fetch(&pending_interrupt[0], &pending_interrupt[1], &pending_interrupt[2]);
    interpreter_release(state);
    return raised;
}

static bool has_arrived(const struct frd_group *g, int rank, uint64_t phase)
{
    return atomic_load_explicit(&g->local[rank].block->line.phase, memory_order_acquire) >= phase;
}

/* Breaks the group if a rank that has not ended phase `phase - 1` has left or died. */
static int check_liveness(struct frd_group *g, uint64_t phase)
{
    for (int r = 0; r < g->ranks; r++) {
        const struct rank_line *line = &g->local[r].block->line;
        if (r == g->rank || has_arrived(g, r, phase)) continue;
        if (atomic_load(&line->life.state) != GONE && is_alive(g->local[r].peer)) continue;
        if (has_arrived(g, r, phase)) continue; /* the rank arrived before it ended */
        /* the rank may have announced a normal end between the two checks */
        const bool left = atomic_load(&line->life.state) == GONE;
        return break_group(g, left ? FRD_LEFT : FRD_DIED, g->rank_of[r], &g->current);
    }
    return FRD_OK;
}

void frd_set_stall_warning(struct frd_group *g, void (*stall_warning)(double waited, double timeout))
{
    g->stall_warning = stall_warning;
}

/* Only the first waiting rank reports late ranks; the interval doubles each time. */
static void warn_of_stall(struct frd_group *g, double now)
{
    if (!g->stall_warning || now < g->warn_at) return;
    g->warn_at = now + (now - g->begun);
    for (int r = 0; r < g->rank; r++)
        if (has_arrived(g, r, g->phase)) return; /* rank r also waits, and reports the late rank */
    g->stall_warning(now - g->begun, g->deadline - g->begun);
}

static int wait_long(struct frd_group *g, int rank, uint64_t phase)
{
    struct rank_line *line = &g->local[rank].block->line;
    /* A call in the background shares its core with the computation of this rank.  A yield would give the core to the
     * computation for a whole time slice, while the other ranks wait; a wake-up interrupts the computation. */
    const int yields = g->flags & FRD_BACKGROUND ? 0 : YIELDS;
    for (int i = 0, idle = 0; i < yields && idle < IDLE_YIELDS; i++) {
        if (yield_core()) g->crowded = CROWDED_WAITS, idle = 0;
        else idle += g->crowded > 0;
        if (has_arrived(g, rank, phase)) return FRD_OK;
    }
    double inspection = seconds_now() + INSPECTION_S, signals = inspection;
    for (;;) {
        /* No wake-up is lost: the sleeper increments `sleepers` and then reads the phase again (as does the kernel).
         * The other rank changes the phase and then reads `sleepers`.  All four accesses are sequentially
         * consistent. */
        atomic_fetch_add(&line->sleepers, 1);
        const uint64_t seen = atomic_load(&line->phase);
        if (seen < phase) futex_wait(low_half(&line->phase), (uint32_t)seen, SLICE_S);
        atomic_fetch_sub(&line->sleepers, 1);
        if (has_arrived(g, rank, phase)) return FRD_OK;

        const double now = seconds_now();
        int status = broken_status(g);
        if (status) return status;
        if (atomic_load(&g->given_up)) return break_group(g, FRD_LEFT, g->group_rank, &g->current);
        if (now >= inspection) {
            status = check_liveness(g, phase);
            if (status) return status;
            inspection = now + INSPECTION_S;
            warn_of_stall(g, now);
        }
        if (g->flags & FRD_MAIN_THREAD && now >= signals) {
            if (interrupted()) {
                break_group(g, FRD_INTERRUPTED, g->group_rank, &g->current);
                return FRD_INTERRUPTED;
            }
            signals = now + SIGNALS_S;
        }
        if (now >= g->deadline) return break_group(g, FRD_LATE, g->rank_of[rank], &g->current);
    }
}

static int wait_for(struct frd_group *g, int rank, uint64_t phase)
{
    if (has_arrived(g, rank, phase)) return FRD_OK;
    if (g->crowded > 0) {
        g->crowded--;
    } else {
        for (int i = 0; i < SPINS; i++) {
            relax();
            if (has_arrived(g, rank, phase)) return FRD_OK;
        }
    }
    return wait_long(g, rank, phase);
}

int end_phase(struct frd_group *g)
{
    struct rank_line *line = g->line;
    const uint64_t phase = ++g->phase;
    atomic_store(&line->phase, phase); /* sequentially consistent: see wait_long */
    if (atomic_load(&line->sleepers)) futex_wake(low_half(&line->phase));
    for (int r = 0; r < g->ranks; r++) {
        if (r == g->rank) continue;
        const int status = wait_for(g, r, phase);
        if (status) return status;
    }
    return FRD_OK;
}
