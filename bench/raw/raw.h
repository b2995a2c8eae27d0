/* The baseline: what aiote's loops cost in plain C over the same provider, with the same promises (a write is done when
 * its bytes are in the target's memory). One process a side; main.c has the line protocol, loops.c the measured work,
 * work.c what those loops are made of, fabric.c, verbs.c and wire.c the kinds of rails. */
#ifndef AIOTE_RAW_H
#define AIOTE_RAW_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    MAX_RAILS = 8,
    NAME_BYTES = 128,
    BATCH = 64,
    RECEIVES = 256,  /* posted at once for messages */
    MESSAGE_BYTES = 65536,
    END = 0xE7D,     /* the immediate that ends a run, beside those that are counted */
    COUNTED = 1,
    SPIN_NS = 50000, /* as engines do by default (EngineConfig.spin_us) */
};

enum what { WRITE, READ, SEND, RECEIVE, CONTROL };

/* A work request; libfabric owns `context` (its fi_context2) until it completes. */
struct work {
    void *context[8];
    struct work *next;
    enum what what;
    uint64_t group;  /* the slot or request that it is of */
};

/* What one side tells the other of each of its rails. */
struct card {
    uint64_t key, base;
    uint32_t length;
    uint8_t name[NAME_BYTES];
    char wire[NAME_BYTES];  /* the provider's name: tcp and tcp;ofi_rxm do not understand each other, and would wait */
};

struct raw;

/* What a kind of rail does. */
struct kind {
    /* Open every rail that `rails` names, and count them. */
    void (*open)(struct raw *self);
    void (*card)(struct raw *self, int rail, struct card *out);
    void (*connect)(struct raw *self, int rail, const struct card *peer);
    /* -EAGAIN: the queue is full; poll and try again. `immediate` below 0: none. It may wait for `flush`. */
    int (*post)(struct raw *self, int rail, struct work *work, uint64_t local, uint64_t remote, size_t size,
                int64_t immediate);
    void (*flush)(struct raw *self);
    /* Take what completed on every rail; the number of completions. */
    int (*poll)(struct raw *self);
    /* Sleep until there may be something to poll, or come back to have it polled once more before. */
    void (*sleep)(struct raw *self);
    void (*close)(struct raw *self);
};

extern const struct kind fabric_kind, verbs_kind, wire_kind;

struct raw {
    const struct kind *kind;
    const char *provider, *library, *rails, *host;
    bool target, sleeps;
    uint64_t spin_ns, busy_ns;    /* how long it polls in vain before it sleeps, and when it last did not */
    int processor, own_eventfd, peer_eventfd;
    uint8_t *arena;
    size_t arena_bytes;
    int rail_count;
    char version[NAME_BYTES];     /* of the library */
    struct work *spare;
    uint64_t counted, ended;      /* immediates that arrived */
    uint64_t received;            /* messages that arrived */
    uint64_t outstanding;         /* posted and not completed, receives aside */
    uint64_t finished;            /* what the loop at work has finished of its run */
    uint64_t *left;               /* pages that each slot's request still waits for */
    uint64_t stride;              /* how many of a rail may be outstanding without one that tells of its end */
    bool quiet;                   /* only what the other side sends is waited for */
    bool receives;                /* whether they are posted */
    void (*on_done)(struct raw *, struct work *);
};

struct run {
    char op[16];
    uint64_t size, window, count, pages, seed;
};

struct result {
    double seconds, cpu, p50, p99, worst;
    bool verified;
};

_Noreturn void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

struct work *work_take(struct raw *self, enum what what, uint64_t group);
void work_give(struct raw *self, struct work *work);
/* What a kind of rail tells of: one of our requests is over; an immediate arrived. */
void completed(struct raw *self, struct work *work);
void arrived(struct raw *self, uint64_t immediate);
/* As the kind's, and counted. */
int post(struct raw *self, int rail, struct work *work, uint64_t local, uint64_t remote, size_t size,
         int64_t immediate);
/* Poll, and in event mode sleep until there is something. */
void progress(struct raw *self);
void post_receives(struct raw *self);

void run_initiator(struct raw *self, const struct run *run, struct result *out);
void run_target(struct raw *self, const struct run *run, struct result *out);
void prepare(struct raw *self, const struct run *run);
bool supported(const struct run *run);
#endif
