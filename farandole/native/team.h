/* The thread pool for generation. */
#ifndef FARANDOLE_TEAM_H
#define FARANDOLE_TEAM_H

#include <stddef.h>

/* One operation: items that any threads may compute in any order.  `scratch` is memory of the computing thread. */
struct frd_work {
    void (*run)(const void *task, size_t number, void *scratch);
    const void *task;
    size_t count, scratch_bytes;
};

/* Runs operations one after another: each begins when all items of the previous operation are complete. */
int frd_run(const struct frd_work *works, size_t count, int threads);

#endif
