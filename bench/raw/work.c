/* What the loops are made of, whatever the kind of rail: requests, what is counted, and progress. */
#include "raw.h"

#include <errno.h>
#include <stdlib.h>
#include <time.h>

struct work *work_take(struct raw *self, enum what what, uint64_t group) {
    struct work *work = self->spare;
    if (work != NULL) self->spare = work->next;
    else if ((work = calloc(1, sizeof(*work))) == NULL) fail("out of memory");
    work->what = what;
    work->group = group;
    return work;
}

void work_give(struct raw *self, struct work *work) {
    work->next = self->spare;
    self->spare = work;
}

void completed(struct raw *self, struct work *work) {
    if (work->what == RECEIVE) self->received++;
    else self->outstanding--;
    if (self->on_done != NULL && work->what != CONTROL) self->on_done(self, work);
    else work_give(self, work);
}

void arrived(struct raw *self, uint64_t immediate) {
    if (immediate == END) self->ended++;
    else self->counted++;
}

int post(struct raw *self, int rail, struct work *work, uint64_t local, uint64_t remote, size_t size,
         int64_t immediate) {
    int code = self->kind->post(self, rail, work, local, remote, size, immediate);
    if (code == 0 && work->what != RECEIVE) self->outstanding++;
    return code;
}

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void progress(struct raw *self) {
    if (self->kind->poll(self) > 0) {
        self->kind->flush(self);
        if (self->spin_ns) self->busy_ns = now_ns();
    } else if (self->sleeps && (self->spin_ns == 0 || now_ns() - self->busy_ns >= self->spin_ns)) {
        self->kind->sleep(self);
    }
}

void post_receives(struct raw *self) {
    for (uint64_t i = 0; i < RECEIVES && !self->receives; i++) {
        struct work *work = work_take(self, RECEIVE, i);
        while (post(self, 0, work, i * MESSAGE_BYTES, 0, MESSAGE_BYTES, -1) == -EAGAIN) self->kind->poll(self);
    }
    self->receives = true;
}
