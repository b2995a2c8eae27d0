/* The baseline: what aiote's loops cost in plain C over the same provider, with the same promises (a write is done when
 * its bytes are in the target's memory). One process a side; main.c has the line protocol, fabric.c the endpoints,
 * loops.c the measured work. */
#ifndef AIOTE_RAW_H
#define AIOTE_RAW_H

#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <stdbool.h>
#include <stdint.h>

enum {
    MAX_RAILS = 8,
    NAME_BYTES = 128,
    BATCH = 64,
    RECEIVES = 256,  /* posted at once for messages */
    MESSAGE_BYTES = 65536,
    END = 0xE7D,     /* the immediate that ends a run, beside those that are counted */
    COUNTED = 1,
};

enum what { WRITE, READ, SEND, RECEIVE, CONTROL };

/* A work request; libfabric owns `context` (FI_CONTEXT2) until it completes. */
struct work {
    struct fi_context2 context;
    struct work *next;
    enum what what;
    uint64_t group;  /* the slot or request that it is of */
};

struct rail {
    struct fi_info *info;
    struct fid_fabric *fabric;
    struct fid_domain *domain;
    struct fid_ep *endpoint;
    struct fid_cq *queue;
    struct fid_av *vector;
    struct fid_mr *memory;
    fi_addr_t peer;
    uint64_t remote_key, remote_base;
    int descriptor;
};

/* What one side tells the other of each of its rails. */
struct card {
    uint64_t key, base;
    uint32_t length;
    uint8_t name[NAME_BYTES];
    char wire[NAME_BYTES];  /* the provider's name: tcp and tcp;ofi_rxm do not understand each other, and would wait */
};

struct raw {
    const char *provider, *library, *rails, *host;
    bool target, sleeps;
    int processor, own_bell, peer_bell;
    uint8_t *arena;
    size_t arena_bytes;
    struct rail rail[MAX_RAILS];
    int rail_count;
    uint32_t version;
    struct work *spare;
    uint64_t counted, ended;      /* immediates that arrived */
    uint64_t received;            /* messages that arrived */
    uint64_t outstanding;         /* posted and not completed, receives aside */
    uint64_t finished;            /* what the loop at work has finished of its run */
    uint64_t *left;               /* pages that each slot's request still waits for */
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
void check(int64_t code, const char *what);

void fabric_open(struct raw *self);
void fabric_card(struct raw *self, int rail, struct card *out);
void fabric_connect(struct raw *self, int rail, const struct card *peer);
void fabric_close(struct raw *self);
struct work *work_take(struct raw *self, enum what what, uint64_t group);
void work_give(struct raw *self, struct work *work);
/* -FI_EAGAIN: the queue is full; poll and try again. `immediate` below 0: none. */
int post(struct raw *self, int rail, struct work *work, uint64_t local, uint64_t remote, size_t size, int64_t immediate);
void post_receives(struct raw *self);
/* Take what completed on every rail; the number of completions. */
int poll_all(struct raw *self);
/* Poll, and in event mode sleep until there is something. */
void progress(struct raw *self);
void ring(struct raw *self);

void run_initiator(struct raw *self, const struct run *run, struct result *out);
void run_target(struct raw *self, const struct run *run, struct result *out);
void prepare(struct raw *self, const struct run *run);
bool supported(const struct run *run);
#endif
