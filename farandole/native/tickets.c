/* Tickets: one for each queued call that no thread has started.
 *
 * The thread of a queue runs calls for which no thread waits.  For most calls a thread soon waits, and the waiting
 * thread runs the call itself.  Waking the queue's thread for such a call would cost several thread switches and would
 * disturb the call on the same core.  A timer therefore wakes the queue's thread when a ticket is GRACE_NS old; a
 * ticket that is taken earlier stops the timer.
 *
 * The lock makes "count, then set the timer" atomic.  So the timer runs from the first open ticket until it fires or no
 * ticket is open.  After the timer has fired, the thread takes tickets until none is open.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "internal.h"

#define GRACE_NS 30000

struct frd_tickets {
    pthread_mutex_t lock;
    int open;     /* tickets that no thread has taken */
    bool armed;   /* the timer runs */
    bool closed;
    int timer;
};

static void set_timer(struct frd_tickets *t, long nanoseconds)
{
    const struct itimerspec when = {.it_value = {0, nanoseconds}};
    t->armed = nanoseconds > 0;
    timerfd_settime(t->timer, 0, &when, NULL);
}

struct frd_tickets *frd_tickets_new(void)
{
    struct frd_tickets *t = calloc(1, sizeof *t);
    if (!t) return NULL;
    t->timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC);
    if (t->timer < 0) {
        free(t);
        return NULL;
    }
    pthread_mutex_init(&t->lock, NULL);
    return t;
}

void frd_tickets_free(struct frd_tickets *t)
{
    close(t->timer);
    pthread_mutex_destroy(&t->lock);
    free(t);
}

void frd_tickets_post(struct frd_tickets *t)
{
    pthread_mutex_lock(&t->lock);
    if (!t->open++) set_timer(t, GRACE_NS);
    pthread_mutex_unlock(&t->lock);
}

void frd_tickets_take(struct frd_tickets *t)
{
    pthread_mutex_lock(&t->lock);
    if (!--t->open && t->armed && !t->closed) set_timer(t, 0);
    pthread_mutex_unlock(&t->lock);
}

void frd_tickets_close(struct frd_tickets *t)
{
    pthread_mutex_lock(&t->lock);
    t->closed = true;
    set_timer(t, 1);
    pthread_mutex_unlock(&t->lock);
}

int frd_tickets_wait(struct frd_tickets *t)
{
    for (;;) {
        pthread_mutex_lock(&t->lock);
        const bool due = t->open > 0 && !t->armed, ends = t->closed && !t->open;
        pthread_mutex_unlock(&t->lock);
        if (due || ends) return due;
        uint64_t times;
        if (read(t->timer, &times, sizeof times) < 0) {
            if (errno != EINTR) return 0;
            continue;
        }
        pthread_mutex_lock(&t->lock);
        t->armed = false;
        pthread_mutex_unlock(&t->lock);
    }
}
