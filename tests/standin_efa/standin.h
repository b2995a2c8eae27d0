/* A libfabric provider named "efa", in software: what its files share. See README.md beside it. */
#ifndef STANDIN_H
#define STANDIN_H

#include <pthread.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <rdma/providers/fi_prov.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/un.h>

enum { ADDRESS_BYTES = 32, FRAGMENT = 32768, MAX_QPN = 4096, TX_DEPTH = 256, RX_DEPTH = 512, AV_ENTRIES = 16384, INJECTED = 32 };

/* EFA's: GID, QPN, padding, QKEY. */
struct address {
    uint8_t gid[16];
    uint16_t qpn, pad;
    uint32_t qkey;
    uint8_t rest[8];
};

enum packet_kind { WRITE, SEND, READ, DATA, ACK, PROBE, ALIVE };

struct packet {
    uint32_t kind, with_data, data;
    int32_t status; /* of an ACK: what fi_cq_err_entry.prov_errno says */
    struct address from, to;
    uint64_t op, offset, total, address, key;
    uint32_t length, copy; /* copy: the first of two, of which the second counts */
};

struct out { /* a packet that waits to leave, or one of a damaged device that waits to be placed */
    struct out *next;
    int64_t due;
    bool copied;
    struct packet head;
    uint8_t payload[];
};

struct op { /* what this side has posted and has no completion yet */
    struct op *next;
    uint64_t number, flags, length, done;
    int64_t heard, probed; /* when the peer last showed that it has it, or was asked, in ms */
    uint8_t *local;
    void *context;
    struct address to;
};

struct landing { /* what comes in pieces from one peer's operation */
    struct landing *next;
    struct packet head;
    uint64_t done;
    int64_t since; /* when it began to wait for a receive, in ms */
    uint8_t *message;
    void *receive; /* of one that is unread: the context of its completion */
    bool whole, waited, unread; /* unread: its completion is in the queue, and its sender was told nothing yet */
};

struct receive {
    void *buffer, *context;
    size_t length;
};

struct entry {
    struct fi_cq_err_entry what;
    struct endpoint *of;
};

struct queue {
    struct fid_cq cq;
    struct device *device;
    struct entry *ring;
    size_t size, first, count;
    int event;
    bool armed;
};

struct vector {
    struct fid_av av;
    struct vector *next;
    struct device *device;
    struct address *entries;
    bool *used;
    size_t top;
};

struct endpoint {
    struct fid_ep ep;
    struct endpoint *next;
    struct device *device;
    struct queue *queue;
    struct vector *vector;
    struct address name;
    int socket;
    bool enabled, broken, heard; /* broken: in the state of errors, all work ends flushed; heard: a packet came from its peer */
    struct op *ops;
    size_t posted;
    uint64_t numbers;
    struct receive receives[RX_DEPTH];
    size_t first, count;
    struct landing *landings;
};

struct memory {
    struct fid_mr mr;
    struct memory *next;
    struct device *device;
    uint64_t address, length, access;
};

struct device {
    struct fid_domain domain;
    struct device *next;
    pthread_mutex_t lock;
    pthread_t thread;
    int wake, wire, nic; /* wire: what packets of pairs that are destroyed meanwhile leave by */
    bool ending;
    uint8_t gid[16];
    uint64_t random;
    struct endpoint *endpoints;
    struct memory *memories;
    struct vector *vectors;
    struct out *out, *late;
    size_t waiting;
};

/* faults.c: what a test asks for, of one NIC (-1: of all) in this process, and what was counted. */
enum fault { HOLD, STOP, LOSE, DUPLICATE, HIDE, DRY, FAULTS };
enum counted { DUPLICATED, HELD, LOST, ORPHANED, DISCARDED, OVERFLOWN, NOT_READY_YET, SILENT,
               FLUSHED_ENDS, BAD_KEY_ENDS, GONE_ENDS, NOT_READY_ENDS, UNREACHABLE_ENDS, COUNTED };
enum { NICS = 8 };
enum damage { WHOLE, SHORT, TWICE, EARLY };
extern enum damage damage; /* of this process from its start on */
long fault_of(const struct device *device, enum fault fault);
bool strikes(struct device *device, enum fault fault); /* of 1000 packets so many */
/* What makes it as strict as the device, or stricter. EFA_STANDIN_LENIENT names one that this process does without, so
 * that it shows which fault of aiote's only that one finds. */
enum strictness { STRICT_ORDER, STRICT_RECEIVES, STRICT_OVERFLOW, STRICT_DISCARD, STRICT_WRITES, STRICT_WAIT, STRICT_QKEY,
                  STRICT_REUSE, STRICT_MESSAGES, STRICT_RIGHTS, STRICT_LATE, STRICT_INJECT, STRICTNESSES };
bool strict(enum strictness which);
void count(enum counted what);
void devices_add(struct device *device);
void devices_remove(struct device *device);
void leave_to_network(struct device *device);

/* wire.c */
enum { FLUSHED = 1 };
int64_t now_ms(void);
void path_of(const struct address *of, struct sockaddr_un *to);
void send_out(struct device *device, const struct packet *head, const void *payload);
void serve_waiting(struct endpoint *self);
void tell_read(struct endpoint *self, const void *receive);
void end_op(struct endpoint *self, struct op **at, int status);
uint64_t draw(struct device *device, uint64_t below);
void wake(struct device *device);
int device_start(struct device *device);
void device_stop(struct device *device);
void complete(struct endpoint *self, const struct fi_cq_err_entry *what);
void break_pair(struct endpoint *self);
void announce_queue(struct queue *queue);
/* pairs.c */
int endpoint_enable(struct endpoint *self);
void endpoint_end(struct endpoint *self);
ssize_t post_op(struct endpoint *self, enum packet_kind kind, const struct iovec *iov, size_t count, fi_addr_t to,
                uint64_t address, uint64_t key, uint64_t flags, uint32_t data, void *context);
ssize_t post_receive(struct endpoint *self, void *buffer, size_t length, void *context);
/* standin.c */
long setting(const char *name, long otherwise);

#endif
