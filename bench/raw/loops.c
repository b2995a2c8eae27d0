/* The measured loops. The initiator works and ends the run with an immediate of its own; the target makes progress until
 * that has come, and answers where the work is a round trip. */
#include "raw.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

static double seconds_of(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static bool is(const struct run *run, const char *op) { return strcmp(run->op, op) == 0; }

bool supported(const struct run *run) {
    static const char *const ops[] = {"write", "read", "pages", "latency", "rate", "send"};
    for (size_t i = 0; i < sizeof(ops) / sizeof(*ops); i++)
        if (is(run, ops[i])) return true;
    return false;
}

/* Bytes of the arena that a run uses, from its start. */
static uint64_t used(const struct run *run) {
    uint64_t slots = run->window < run->count ? run->window : run->count;
    if (is(run, "latency")) slots = 1;
    return slots * run->size * (is(run, "pages") ? run->pages : 1);
}

static uint64_t word(const struct run *run, uint64_t i) {
    return run->seed * 0x9E3779B97F4A7C15u + i * 0xBF58476D1CE4E5B9u;
}

/* The receives of the first run for messages stay posted, so each has a place of its own for messages of any size. */
static uint64_t reach(struct raw *self, const struct run *run) {
    return self->target && is(run, "send") ? (uint64_t)RECEIVES * MESSAGE_BYTES : used(run);
}

void prepare(struct raw *self, const struct run *run) {
    bool fills = self->target == is(run, "read");
    uint64_t bytes = reach(self, run);
    if (run->window == 0 || run->count == 0 || run->size == 0 || run->size % 8)
        fail("a run needs a window, a count and a size in whole words");
    if (is(run, "send") && run->size > MESSAGE_BYTES) fail("messages have at most %d bytes", MESSAGE_BYTES);
    if (bytes + 8 > self->arena_bytes)  /* the last word is for the immediate that ends a run */
        fail("the run needs %llu bytes, the arena has %zu", (unsigned long long)bytes + 8, self->arena_bytes);
    for (uint64_t i = 0; i < bytes / 8; i++) ((uint64_t *)self->arena)[i] = fills ? word(run, i) : 0;
    self->counted = self->ended = self->received = self->finished = 0;
    self->stride = run->window * (is(run, "pages") ? run->pages : 1) / (4 * (uint64_t)self->rail_count);
    free(self->left);
    self->left = calloc(run->window, sizeof(*self->left));
    if (self->left == NULL) fail("out of memory");
    if (is(run, "send") && self->target) post_receives(self);
}

static bool same_page(struct raw *self, const struct run *run, uint64_t slot, uint64_t page) {
    uint64_t words = run->size / 8, base = slot * run->pages * words;
    const uint64_t *there = (uint64_t *)self->arena + base + page * 7919 % run->pages * words;
    for (uint64_t i = 0; i < words; i++)
        if (there[i] != word(run, base + page * words + i)) return false;
    return true;
}

/* Whether a receive holds the whole message of one of the slots. */
static bool same_message(const struct run *run, const uint64_t *message) {
    uint64_t slot = 0, words = run->size / 8;
    while (slot < run->window && message[0] != word(run, slot * words)) slot++;
    for (uint64_t i = 0; slot < run->window && i < words; i++)
        if (message[i] != word(run, slot * words + i)) return false;
    return slot < run->window;
}

static bool verify(struct raw *self, const struct run *run) {
    if (is(run, "pages")) {
        for (uint64_t slot = 0; slot < run->window && slot < run->count; slot++)
            for (uint64_t page = 0; page < run->pages; page++)
                if (!same_page(self, run, slot, page)) return false;
        return true;
    }
    if (is(run, "send")) {
        /* Which receives a short run fills depends on the runs before it; the others are as they were cleared. */
        uint64_t filled = 0;
        for (uint64_t i = 0; i < RECEIVES; i++) {
            const uint64_t *message = (uint64_t *)(self->arena + i * MESSAGE_BYTES);
            if (message[0] == 0) continue;
            if (!same_message(run, message)) return false;
            filled++;
        }
        return filled == (run->count < RECEIVES ? run->count : RECEIVES);
    }
    for (uint64_t i = 0; i < used(run) / 8; i++)
        if (((uint64_t *)self->arena)[i] != word(run, i)) return false;
    return true;
}

static void post_must(struct raw *self, int rail, struct work *work, uint64_t at, uint64_t to, size_t size,
                      int64_t immediate) {
    while (post(self, rail, work, at, to, size, immediate) == -EAGAIN) {
        self->kind->flush(self);
        self->kind->poll(self);
    }
}

static void finish_slot(struct raw *self, struct work *work) {
    self->finished++;
    self->left[work->group] = 0;
    work_give(self, work);
}

/* Writes, reads and messages: a slot each, posted again as soon as it is free. */
static void run_slots(struct raw *self, const struct run *run, enum what what) {
    uint64_t posted = 0, slot = 0;
    self->on_done = finish_slot;
    while (self->finished < run->count) {
        bool posts = false;
        while (posted < run->count && posted - self->finished < run->window) {
            struct work *work;
            int rail;
            while (self->left[slot]) slot = (slot + 1) % run->window;
            work = work_take(self, what, slot);
            /* The receives for messages are the first rail's. */
            rail = what == SEND ? 0 : (int)(slot % (uint64_t)self->rail_count);
            if (post(self, rail, work, slot * run->size, slot * run->size, run->size, -1) != 0) {
                work_give(self, work);
                break;
            }
            self->left[slot] = 1;
            posted++;
            posts = true;
        }
        if (posts) self->kind->flush(self);
        progress(self);
    }
}

static void finish_page(struct raw *self, struct work *work) {
    if (--self->left[work->group] == 0) self->finished++;
    work_give(self, work);
}

/* Requests of many pages, each page with an immediate that the target counts. */
static void run_pages(struct raw *self, const struct run *run) {
    uint64_t request = 0, page = 0;
    self->on_done = finish_page;
    while (self->finished < run->count) {
        bool posts = false;
        while (request < run->count && (page > 0 || request - self->finished < run->window)) {
            uint64_t slot = request % run->window, base = slot * run->pages * run->size;
            struct work *work;
            if (page == 0 && self->left[slot]) break;
            work = work_take(self, WRITE, slot);
            if (post(self, (int)(page % (uint64_t)self->rail_count), work, base + page * run->size,
                     base + page * 7919 % run->pages * run->size, run->size, COUNTED) != 0) {
                work_give(self, work);
                break;
            }
            if (page == 0) self->left[slot] = run->pages;
            posts = true;
            if (++page == run->pages) page = 0, request++;
        }
        if (posts) self->kind->flush(self);
        progress(self);
    }
}

static int by_value(const void *a, const void *b) {
    double one = *(const double *)a, other = *(const double *)b;
    return one < other ? -1 : one > other;
}

static void run_round_trips(struct raw *self, const struct run *run, struct result *out) {
    double *times = malloc(run->count * sizeof(*times)), before = seconds_of(CLOCK_MONOTONIC), now;
    if (times == NULL) fail("out of memory");
    self->on_done = NULL;
    self->quiet = true;
    for (uint64_t i = 0; i < run->count; i++) {
        post_must(self, 0, work_take(self, WRITE, 0), 0, 0, run->size, COUNTED);
        self->kind->flush(self);
        while (self->counted <= i) progress(self);
        now = seconds_of(CLOCK_MONOTONIC);
        times[i] = (now - before) * 1e6;
        before = now;
    }
    self->quiet = false;
    while (self->outstanding) progress(self);
    qsort(times, run->count, sizeof(*times), by_value);
    /* The nearest rank, as aiote's own statistics have it. */
    out->p50 = times[(run->count * 50 + 99) / 100 - 1];
    out->p99 = times[(run->count * 99 + 99) / 100 - 1];
    out->worst = times[run->count - 1];
    free(times);
}

void run_initiator(struct raw *self, const struct run *run, struct result *out) {
    double begun = seconds_of(CLOCK_MONOTONIC), cpu = seconds_of(CLOCK_PROCESS_CPUTIME_ID);
    if (is(run, "latency")) run_round_trips(self, run, out);
    else if (is(run, "pages")) run_pages(self, run);
    else run_slots(self, run, is(run, "read") ? READ : is(run, "send") ? SEND : WRITE);
    out->seconds = seconds_of(CLOCK_MONOTONIC) - begun;
    self->on_done = NULL;
    post_must(self, 0, work_take(self, CONTROL, 0), self->arena_bytes - 8, self->arena_bytes - 8, 8, END);
    self->kind->flush(self);
    while (self->outstanding) progress(self);
    out->cpu = seconds_of(CLOCK_PROCESS_CPUTIME_ID) - cpu;
    out->verified = !is(run, "read") || verify(self, run);
}

static void take_message(struct raw *self, struct work *work) {
    if (work->what != RECEIVE) {
        work_give(self, work);
        return;
    }
    while (post(self, 0, work, work->group * MESSAGE_BYTES, 0, MESSAGE_BYTES, -1) == -EAGAIN) continue;
}

void run_target(struct raw *self, const struct run *run, struct result *out) {
    double begun = seconds_of(CLOCK_MONOTONIC), cpu = seconds_of(CLOCK_PROCESS_CPUTIME_ID);
    uint64_t answered = 0;
    self->on_done = is(run, "send") ? take_message : NULL;
    while (!self->ended || self->outstanding || (is(run, "send") && self->received < run->count)) {
        self->quiet = is(run, "latency") && !self->ended;
        progress(self);
        for (; is(run, "latency") && answered < self->counted; answered++) {
            post_must(self, 0, work_take(self, WRITE, 0), 0, 0, run->size, COUNTED);
            self->kind->flush(self);
        }
    }
    self->kind->flush(self);
    out->seconds = seconds_of(CLOCK_MONOTONIC) - begun;
    out->cpu = seconds_of(CLOCK_PROCESS_CPUTIME_ID) - cpu;
    out->verified = is(run, "read") || is(run, "latency") || verify(self, run);
    if (is(run, "pages")) out->verified = out->verified && self->counted == run->count * run->pages;
}
