/* The wire and the NIC: a thread of the device places what comes, answers, and completes; the target makes no call.
 *
 * Packets are datagrams between sockets that are called after GID and QPN, in a folder that both sides know. Those that
 * wait to leave do so in any order. */
#define _GNU_SOURCE
#include "standin.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

/* prov_errno as EFA's NIC has them, and the errno that libfabric makes of each (prov/efa/src/efa_errno.h, 2.x). */
enum { BAD_KEY = 7, GONE = 9, NOT_READY = 10, BAD_LENGTH = 11, UNRESPONSIVE = 13, UNKNOWN_PEER = 14,
       UNREACHABLE = 15 };
enum { LATE_MS = 50 };

static int errno_of(int status) {
    switch (status) {
    case FLUSHED: return FI_ECANCELED;
    case BAD_KEY: return FI_EINVAL;
    case GONE: case UNKNOWN_PEER: return FI_ENOTCONN;
    case NOT_READY: return FI_ENORX;
    case BAD_LENGTH: return FI_EMSGSIZE;
    case UNRESPONSIVE: return FI_ECONNABORTED;
    case UNREACHABLE: return FI_EHOSTUNREACH;
    default: return FI_EIO;
    }
}

static void count_end(int status) {
    switch (status) {
    case FLUSHED: count(FLUSHED_ENDS); break;
    case BAD_KEY: count(BAD_KEY_ENDS); break;
    case GONE: count(GONE_ENDS); break;
    case NOT_READY: count(NOT_READY_ENDS); break;
    case UNREACHABLE: count(UNREACHABLE_ENDS); break;
    default: break;
    }
}

int64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

uint64_t draw(struct device *device, uint64_t below) {
    device->random = device->random * 6364136223846793005ULL + 1442695040888963407ULL;
    return below ? (device->random >> 33) % below : 0;
}

void path_of(const struct address *of, struct sockaddr_un *to) {
    const char *folder = getenv("EFA_STANDIN_WIRE");
    memset(to, 0, sizeof(*to));
    to->sun_family = AF_UNIX;
    snprintf(to->sun_path, sizeof(to->sun_path), "%.70s/%.16s-%u", folder ? folder : "/tmp", (const char *)of->gid, of->qpn);
}

/* A queue without a limit. */
static void grow(struct queue *queue) {
    struct entry *ring = calloc(2 * queue->size, sizeof(*ring));
    if (ring == NULL) abort();
    for (size_t i = 0; i < queue->count; i++) ring[i] = queue->ring[(queue->first + i) % queue->size];
    free(queue->ring);
    queue->ring = ring;
    queue->first = 0;
    queue->size *= 2;
}

void complete(struct endpoint *self, const struct fi_cq_err_entry *what) {
    struct queue *queue = self->queue;
    if (queue->count == queue->size && !strict(STRICT_OVERFLOW)) grow(queue);
    if (queue->count == queue->size) { /* overflow: dropped, and nobody is told */
        count(OVERFLOWN);
        return;
    }
    struct entry *entry = &queue->ring[(queue->first + queue->count++) % queue->size];
    entry->what = *what;
    entry->of = self;
    announce_queue(queue);
}

void announce_queue(struct queue *queue) {
    uint64_t one = 1;
    if (queue->count == 0 || (!queue->armed && strict(STRICT_WAIT))) return;
    queue->armed = false;
    if (write(queue->event, &one, sizeof(one)) < 0) abort();
}

void wake(struct device *device) {
    uint64_t one = 1;
    if (write(device->wake, &one, sizeof(one)) < 0) abort();
}

void send_out(struct device *device, const struct packet *head, const void *payload) {
    struct out *out = malloc(sizeof(*out) + head->length);
    struct out **at = &device->out;
    uint64_t skip = strict(STRICT_ORDER) ? draw(device, device->waiting + 1) : device->waiting;
    if (out == NULL) abort();
    out->copied = false;
    out->head = *head;
    if (head->length) memcpy(out->payload, payload, head->length);
    while (skip-- && *at != NULL) at = &(*at)->next;
    out->next = *at;
    *at = out;
    device->waiting++;
    wake(device);
}

static void answer(struct endpoint *self, const struct packet *to, int status) {
    struct packet head = {.kind = ACK, .status = status, .from = self->name, .to = to->from, .op = to->op};
    send_out(self->device, &head, NULL);
}

void end_op(struct endpoint *self, struct op **at, int status) {
    struct op *op = *at;
    struct fi_cq_err_entry what = {.op_context = op->context, .flags = op->flags & (FI_MSG | FI_RMA | FI_SEND | FI_WRITE | FI_READ),
                                   .err = status ? errno_of(status) : 0, .prov_errno = status};
    *at = op->next;
    self->posted--;
    count_end(status);
    if (status || op->flags & FI_COMPLETION) complete(self, &what);
    free(op);
}

void break_pair(struct endpoint *self) {
    self->broken = true;
    while (self->ops != NULL) end_op(self, &self->ops, FLUSHED);
}

static struct op **find_op(struct endpoint *self, uint64_t number) {
    struct op **at = &self->ops;
    while (*at != NULL && (*at)->number != number) at = &(*at)->next;
    return at;
}

static struct memory *granted(struct device *device, const struct packet *head, uint64_t right) {
    struct memory *memory = device->memories;
    while (memory != NULL && memory->mr.key != head->key) memory = memory->next;
    if (memory == NULL || !(memory->access & right)) return NULL;
    if (head->address < memory->address || head->address - memory->address > memory->length) return NULL;
    return head->total > memory->length - (head->address - memory->address) ? NULL : memory;
}

static bool known(const struct endpoint *self, const struct address *from) {
    for (size_t i = 0; i < self->vector->top; i++)
        if (self->vector->used[i] && !memcmp(self->vector->entries[i].gid, from->gid, sizeof(from->gid))) return true;
    return false;
}

/* Give a message, or an immediate, to a posted receive; without one it waits, for ever: RNR with retries. */
static bool deliver(struct endpoint *self, struct landing *landing) {
    struct packet *head = &landing->head;
    struct fi_cq_err_entry what = {.len = head->total, .data = head->data};
    struct receive *receive;
    if (head->kind == WRITE && !head->with_data) return true;
    if (head->kind == WRITE && !strict(STRICT_RECEIVES)) { /* unsolicited */
        what.flags = FI_RMA | FI_REMOTE_WRITE | FI_REMOTE_CQ_DATA;
        complete(self, &what);
        return true;
    }
    if (self->count == 0 || fault_of(self->device, DRY)) {
        if (!landing->waited) count(NOT_READY_YET);
        if (!landing->waited) landing->since = now_ms();
        landing->waited = true;
        return false;
    }
    receive = &self->receives[self->first];
    self->first = (self->first + 1) % RX_DEPTH;
    self->count--;
    what.op_context = landing->receive = receive->context;
    what.flags = head->kind == SEND ? FI_MSG | FI_RECV : FI_RMA | FI_REMOTE_WRITE | FI_REMOTE_CQ_DATA;
    if (head->kind == SEND && head->total > receive->length) {
        what.err = FI_EMSGSIZE;
        what.prov_errno = BAD_LENGTH;
    } else if (head->kind == SEND)
        memcpy(receive->buffer, landing->message, head->total);
    complete(self, &what);
    if (damage == TWICE && head->kind == WRITE && self->count > 0) {
        what.op_context = self->receives[self->first].context;
        self->first = (self->first + 1) % RX_DEPTH;
        self->count--;
        complete(self, &what);
    }
    return true;
}

static void end_landing(struct endpoint *self, struct landing **at, int status) {
    struct landing *landing = *at;
    answer(self, &landing->head, status);
    *at = landing->next;
    free(landing->message);
    free(landing);
}

void serve_waiting(struct endpoint *self) {
    for (struct landing **at = &self->landings, *landing; (landing = *at) != NULL;) {
        if (!landing->whole || landing->unread || !deliver(self, landing)) {
            at = &landing->next;
            continue;
        }
        landing->waited = false;
        landing->unread = landing->head.with_data && !strict(STRICT_DISCARD);
        if (!landing->unread) end_landing(self, at, 0);
    }
}

/* The sender of an immediate is told only now that the target has read it, so no close drops what a sender was told of. */
void tell_read(struct endpoint *self, const void *receive) {
    struct landing **at = &self->landings;
    while (*at != NULL && !((*at)->unread && (*at)->receive == receive)) at = &(*at)->next;
    if (*at != NULL) end_landing(self, at, 0);
}

/* Of a dry NIC, whose retries have an end: what waited for so long without a receive fails at its sender. */
static bool end_dry(struct device *device) {
    long limit = fault_of(device, DRY);
    bool waits = false;
    for (struct endpoint *self = device->endpoints; self != NULL; self = self->next) {
        if (!limit) serve_waiting(self);
        for (struct landing **at = &self->landings, *landing; limit && (landing = *at) != NULL;) {
            waits |= landing->waited;
            if (landing->waited && now_ms() - landing->since >= limit) end_landing(self, at, NOT_READY);
            else at = &landing->next;
        }
    }
    return waits;
}

static struct landing *find_landing(struct endpoint *self, const struct packet *head) {
    struct landing *landing = self->landings;
    while (landing != NULL && (landing->head.op != head->op || memcmp(&landing->head.from, &head->from, sizeof(head->from))))
        landing = landing->next;
    return landing;
}

/* Place the bytes of a piece: of a damaged device not the last one, or only after the count. */
static void place(struct endpoint *self, const struct packet *head, const uint8_t *payload, uint8_t *to) {
    struct out *late;
    if (damage == EARLY && head->kind == WRITE && head->with_data && head->length) {
        late = calloc(1, sizeof(*late) + head->length);
        if (late == NULL) abort();
        *late = (struct out){.next = self->device->late, .due = now_ms() + LATE_MS, .head = *head};
        memcpy(late->payload, payload, head->length);
        self->device->late = late;
    } else if (head->length)
        memcpy(to + head->offset, payload, head->length - (damage == SHORT && head->kind == WRITE));
}

/* Place what a damaged device has kept back, unless its memory is gone; tell whether more of it is to come. */
static bool place_late(struct device *device) {
    struct out **at = &device->late, *late;
    while ((late = *at) != NULL) {
        if (late->due > now_ms()) {
            at = &late->next;
            continue;
        }
        if (granted(device, &late->head, FI_REMOTE_WRITE) != NULL)
            memcpy((uint8_t *)(uintptr_t)late->head.address + late->head.offset, late->payload, late->head.length);
        *at = late->next;
        free(late);
    }
    return device->late != NULL;
}

static void take_piece(struct endpoint *self, const struct packet *head, const uint8_t *payload) {
    struct landing *landing, **at;
    struct memory *memory = head->kind == WRITE ? granted(self->device, head, FI_REMOTE_WRITE) : NULL;
    if (head->kind == WRITE && memory == NULL) {
        if (!head->copy) answer(self, head, BAD_KEY);
        return;
    }
    landing = find_landing(self, head);
    if (head->copy) { /* before what it is a copy of, so before the acknowledgement: its bytes land, and nothing is told */
        count(DUPLICATED);
        if (head->kind == WRITE && head->length) memcpy((uint8_t *)(uintptr_t)head->address + head->offset, payload, head->length);
        return;
    }
    if (landing == NULL) {
        landing = calloc(1, sizeof(*landing));
        if (landing == NULL) abort();
        landing->head = *head;
        landing->message = head->kind == SEND ? malloc(head->total + 1) : NULL;
        for (at = &self->landings; *at != NULL && !strict(STRICT_ORDER);) at = &(*at)->next;
        landing->next = *at;
        *at = landing;
    }
    place(self, head, payload, head->kind == SEND ? landing->message : (uint8_t *)(uintptr_t)head->address);
    landing->done += head->length;
    landing->whole = landing->done >= head->total;
    serve_waiting(self);
}

/* A sender asks whether its operation is known here: as the NIC answers a packet for which no receive is posted. */
static void take_probe(struct endpoint *self, const struct packet *head) {
    struct packet alive = {.kind = ALIVE, .from = self->name, .to = head->from, .op = head->op};
    if (find_landing(self, head) != NULL) send_out(self->device, &alive, NULL);
}

static void take_read(struct endpoint *self, const struct packet *head) {
    struct packet piece = {.kind = DATA, .from = self->name, .to = head->from, .op = head->op, .total = head->total};
    if (granted(self->device, head, FI_REMOTE_READ) == NULL) {
        answer(self, head, BAD_KEY);
        return;
    }
    do {
        piece.length = head->total - piece.offset < FRAGMENT ? head->total - piece.offset : FRAGMENT;
        send_out(self->device, &piece, (uint8_t *)(uintptr_t)(head->address + piece.offset));
        piece.offset += piece.length;
    } while (piece.offset < head->total);
}

static void take_packet(struct endpoint *self, const struct packet *head, const uint8_t *payload) {
    struct op **at;
    if (self->broken || (head->to.qkey != self->name.qkey && strict(STRICT_QKEY))) return; /* for an earlier pair of this number */
    self->heard = true;
    if (head->kind == ALIVE) {
        at = find_op(self, head->op);
        if (*at != NULL) (*at)->heard = now_ms();
    } else if (head->kind == PROBE)
        take_probe(self, head);
    else if (head->kind == ACK || head->kind == DATA) {
        at = find_op(self, head->op);
        if (*at == NULL) return;
        if (head->kind == DATA && head->length) memcpy((*at)->local + head->offset, payload, head->length);
        if (head->kind == DATA) (*at)->done += head->length;
        if (head->kind == ACK || (*at)->done >= (*at)->length) end_op(self, at, head->status);
    } else if (!known(self, &head->from)) {
        if (!head->copy) answer(self, head, UNKNOWN_PEER);
    } else if (head->kind == READ)
        take_read(self, head);
    else
        take_piece(self, head, payload);
}

static void take_all(struct endpoint *self) {
    static _Thread_local uint8_t buffer[sizeof(struct packet) + FRAGMENT];
    struct packet head;
    for (int turn = 0; turn < 64; turn++) {
        ssize_t got = recv(self->socket, buffer, sizeof(buffer), MSG_DONTWAIT);
        if (got < (ssize_t)sizeof(head)) return;
        memcpy(&head, buffer, sizeof(head));
        if (head.length == got - sizeof(head)) take_packet(self, &head, buffer + sizeof(head));
    }
}

static struct endpoint *endpoint_of(struct device *device, const struct address *name) {
    struct endpoint *self = device->endpoints;
    while (self != NULL && memcmp(&self->name, name, sizeof(*name))) self = self->next;
    return self;
}

/* Give one packet to the wire, also for a pair that is destroyed; false where the other side has no room yet. */
static bool send_one(struct device *device, struct out *out) {
    struct endpoint *self = endpoint_of(device, &out->head.from);
    struct iovec iov[2] = {{&out->head, sizeof(out->head)}, {out->payload, out->head.length}};
    struct sockaddr_un to;
    struct msghdr message = {.msg_name = &to, .msg_namelen = sizeof(to), .msg_iov = iov, .msg_iovlen = 2};
    ssize_t sent;
    if (strikes(device, LOSE)) {
        count(LOST);
        return true;
    }
    path_of(&out->head.to, &to);
    /* A pair has a socket of its own: what a stopped process does not read must not fill the one that others send by. */
    sent = sendmsg(self != NULL ? self->socket : device->wire, &message, MSG_DONTWAIT);
    if (sent < 0 && (errno == EAGAIN || errno == ENOBUFS)) return false;
    if (self == NULL && sent >= 0 && out->head.kind <= SEND) count(ORPHANED);
    if (self != NULL && sent < 0 && out->head.kind <= READ) {
        struct op **op = find_op(self, out->head.op);
        if (*op != NULL) end_op(self, op, GONE);
    }
    return true;
}

/* Send what waits; what is held, or has no room at the other side, waits on. Tell whether some of the latter does. */
static bool send_all(struct device *device) {
    struct out **at = &device->out;
    bool waits = false;
    while (*at != NULL) {
        struct out *out = *at;
        if (fault_of(device, HOLD) >> out->head.kind & 1) {
            count(HELD);
            at = &out->next;
            continue;
        }
        out->head.copy = out->head.kind <= SEND && !out->copied && strikes(device, DUPLICATE);
        if (!send_one(device, out)) {
            waits = true;
            if (!strict(STRICT_ORDER)) break;
            at = &out->next;
        } else if (out->head.copy)
            out->copied = true; /* and leaves once more */
        else {
            *at = out->next;
            device->waiting--;
            free(out);
        }
    }
    return waits;
}

/* End what a peer has not answered for; tell whether something is to be looked at again. */
static bool end_unanswered(struct device *device) {
    int64_t now = now_ms(), limit = setting("EFA_STANDIN_SILENCE_MS", 10000);
    bool waits = false;
    for (struct endpoint *self = device->endpoints; self != NULL; self = self->next)
        for (struct op **at = &self->ops, *op; (op = *at) != NULL;) {
            waits = true;
            if (now - op->heard >= limit) {
                count(SILENT);
                end_op(self, at, self->heard ? UNRESPONSIVE : UNREACHABLE);
                continue;
            }
            if (now - op->heard >= limit / 4 && now - op->probed >= limit / 8) {
                struct packet probe = {.kind = PROBE, .from = self->name, .to = op->to, .op = op->number};
                op->probed = now;
                send_out(device, &probe, NULL);
            }
            at = &op->next;
        }
    return waits;
}

/* Whether there is something to do at once (0 us), soon, or in a while; else for good. */
static int sleep_until(struct device *device, struct pollfd *fds, size_t count, bool waits, bool outstanding) {
    struct timespec soon = {0, 50000}, later = {0, 20000000};
    bool stops = fault_of(device, STOP);
    return ppoll(fds, stops ? 1 : count, stops ? NULL : waits ? &soon : outstanding ? &later : NULL, NULL);
}

static void *run(void *arg) {
    struct device *device = arg;
    struct pollfd *fds = calloc(MAX_QPN + 1, sizeof(*fds));
    uint64_t value;
    bool waits = false, outstanding = false;
    if (fds == NULL) abort();
    pthread_mutex_lock(&device->lock);
    while (!device->ending) {
        size_t count = 1;
        fds[0] = (struct pollfd){.fd = device->wake, .events = POLLIN};
        for (struct endpoint *self = device->endpoints; self != NULL; self = self->next)
            fds[count++] = (struct pollfd){.fd = self->socket, .events = POLLIN};
        pthread_mutex_unlock(&device->lock);
        sleep_until(device, fds, count, waits, outstanding);
        pthread_mutex_lock(&device->lock);
        if (read(device->wake, &value, sizeof(value)) < 0 && errno != EAGAIN) abort();
        if (fault_of(device, STOP)) continue;
        for (struct endpoint *self = device->endpoints; self != NULL; self = self->next) take_all(self);
        outstanding = place_late(device);
        outstanding |= end_unanswered(device);
        outstanding |= end_dry(device);
        waits = send_all(device);
    }
    pthread_mutex_unlock(&device->lock);
    free(fds);
    return NULL;
}

int device_start(struct device *device) {
    device->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    device->wire = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (device->wake < 0 || device->wire < 0) return -errno;
    pthread_mutex_init(&device->lock, NULL);
    device->random = (uint64_t)setting("EFA_STANDIN_SEED", 1);
    devices_add(device);
    return pthread_create(&device->thread, NULL, run, device) ? -FI_ENOMEM : 0;
}

static void drop(struct out *first) {
    while (first != NULL) {
        struct out *next = first->next;
        free(first);
        first = next;
    }
}

void device_stop(struct device *device) {
    devices_remove(device);
    pthread_mutex_lock(&device->lock);
    device->ending = true;
    pthread_mutex_unlock(&device->lock);
    wake(device);
    pthread_join(device->thread, NULL);
    leave_to_network(device);
    drop(device->out);
    drop(device->late);
    close(device->wake);
    close(device->wire);
}
