/* Queue pairs: made, given work, destroyed. */
#define _GNU_SOURCE
#include "standin.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

/* Bind to a number unless a pair that lives has it. What a killed process had, the kernel frees. */
static bool take_number(struct endpoint *self) {
    struct sockaddr_un path;
    int probe;
    bool stale;
    path_of(&self->name, &path);
    if (bind(self->socket, (struct sockaddr *)&path, sizeof(path)) == 0) return true;
    probe = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    stale = probe >= 0 && connect(probe, (struct sockaddr *)&path, sizeof(path)) < 0 && errno == ECONNREFUSED;
    if (probe >= 0) close(probe);
    return stale && unlink(path.sun_path) == 0 && bind(self->socket, (struct sockaddr *)&path, sizeof(path)) == 0;
}

int endpoint_enable(struct endpoint *self) {
    struct device *device = self->device;
    static atomic_uint made; /* of this process */
    long most = setting("EFA_STANDIN_QPS", 256), first = strict(STRICT_REUSE) ? 1 : 1 + made++;
    const char *folder = getenv("EFA_STANDIN_WIRE");
    int lock = open(folder ? folder : "/tmp", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    bool bound = false;
    self->socket = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (self->socket < 0 || lock < 0) return -errno;
    flock(lock, LOCK_EX);
    memcpy(self->name.gid, device->gid, sizeof(device->gid));
    if (getrandom(&self->name.qkey, sizeof(self->name.qkey), 0) < 0) abort();
    /* The lowest number that is free, so that it is used again at once; all processes of the host have the NIC's. */
    for (long number = first; number < first + most && !bound; number++) {
        self->name.qpn = number;
        bound = take_number(self);
    }
    close(lock);
    if (!bound) {
        close(self->socket);
        self->socket = -1;
        return -FI_ENOMEM;
    }
    pthread_mutex_lock(&device->lock);
    self->enabled = true;
    self->next = device->endpoints;
    device->endpoints = self;
    pthread_mutex_unlock(&device->lock);
    wake(device);
    return 0;
}

/* Have what a pair has sent arrive no more, although it left. */
static void take_back(struct device *device, const struct address *from) {
    for (struct out **at = &device->out, *out; (out = *at) != NULL;) {
        if (memcmp(&out->head.from, from, sizeof(*from))) {
            at = &out->next;
            continue;
        }
        *at = out->next;
        device->waiting--;
        free(out);
    }
}

/* Destroy the pair: its work is over and reported to nobody, and what the queue holds of it unread is dropped. */
void endpoint_end(struct endpoint *self) {
    struct device *device = self->device;
    struct endpoint **at = &device->endpoints;
    struct sockaddr_un path;
    size_t kept = 0;
    if (!self->enabled) return;
    pthread_mutex_lock(&device->lock);
    while (*at != self) at = &(*at)->next;
    *at = self->next;
    if (!strict(STRICT_LATE)) take_back(device, &self->name);
    path_of(&self->name, &path);
    unlink(path.sun_path);
    close(self->socket);
    while (self->ops != NULL) {
        struct op *op = self->ops;
        self->ops = op->next;
        free(op);
    }
    while (self->landings != NULL) {
        struct landing *landing = self->landings;
        self->landings = landing->next;
        free(landing->message);
        free(landing);
    }
    for (size_t i = 0; i < self->queue->count; i++) {
        struct entry entry = self->queue->ring[(self->queue->first + i) % self->queue->size];
        if (entry.of != self) self->queue->ring[(self->queue->first + kept++) % self->queue->size] = entry;
        else if (entry.what.flags & FI_REMOTE_CQ_DATA) count(DISCARDED);
    }
    self->queue->count = kept;
    pthread_mutex_unlock(&device->lock);
}

ssize_t post_op(struct endpoint *self, enum packet_kind kind, const struct iovec *iov, size_t count, fi_addr_t to,
                uint64_t address, uint64_t key, uint64_t flags, uint32_t data, void *context) {
    struct device *device = self->device;
    struct packet head = {.kind = kind, .with_data = !!(flags & FI_REMOTE_CQ_DATA), .data = data, .from = self->name};
    uint64_t length = count ? iov[0].iov_len : 0;
    struct op *op;
    if (count > 1) return -FI_EINVAL;
    if (kind == SEND && length > (uint64_t)setting("EFA_STANDIN_MTU", 8192) && strict(STRICT_MESSAGES)) return -FI_EMSGSIZE;
    if (kind != SEND && length > (uint64_t)setting("EFA_STANDIN_RMA", 1 << 20) && strict(STRICT_WRITES)) return -FI_EMSGSIZE;
    if (flags & FI_INJECT && length > (kind == SEND ? INJECTED : 0) && strict(STRICT_INJECT)) return -FI_EINVAL;
    pthread_mutex_lock(&device->lock);
    if (self->posted >= TX_DEPTH || to >= self->vector->top || !self->vector->used[to]) {
        pthread_mutex_unlock(&device->lock);
        return self->posted >= TX_DEPTH ? -FI_EAGAIN : -FI_EINVAL;
    }
    op = calloc(1, sizeof(*op));
    if (op == NULL) abort();
    *op = (struct op){.next = self->ops, .number = ++self->numbers, .flags = flags, .length = length,
                      .heard = now_ms(), .local = count ? iov[0].iov_base : NULL, .context = context,
                      .to = self->vector->entries[to]};
    self->ops = op;
    self->posted++;
    if (self->broken) {
        end_op(self, &self->ops, FLUSHED);
        pthread_mutex_unlock(&device->lock);
        return 0;
    }
    head.to = op->to;
    head.op = op->number;
    head.total = length;
    head.address = address;
    head.key = key;
    do {
        head.length = kind == READ ? 0 : length - head.offset < FRAGMENT ? length - head.offset : FRAGMENT;
        send_out(device, &head, op->local + head.offset);
        head.offset += head.length;
    } while (kind != READ && head.offset < length);
    pthread_mutex_unlock(&device->lock);
    return 0;
}

ssize_t post_receive(struct endpoint *self, void *buffer, size_t length, void *context) {
    struct device *device = self->device;
    ssize_t code = -FI_EAGAIN;
    pthread_mutex_lock(&device->lock);
    if (self->count < RX_DEPTH) {
        self->receives[(self->first + self->count++) % RX_DEPTH] = (struct receive){buffer, context, length};
        serve_waiting(self);
        code = 0;
    }
    pthread_mutex_unlock(&device->lock);
    wake(device);
    return code;
}
