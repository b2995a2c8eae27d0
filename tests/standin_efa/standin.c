/* The provider's tables: what getinfo says, and the objects that are opened. */
#define _GNU_SOURCE
#include "standin.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define OF(type, member, pointer) ((type *)((char *)(pointer) - offsetof(type, member)))
#define MR_MODE (FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY)

long setting(const char *name, long otherwise) {
    const char *value = getenv(name);
    return value != NULL && *value ? strtol(value, NULL, 0) : otherwise;
}

static bool is(const char *name, const char *value) {
    const char *set = getenv(name);
    return set != NULL && strcmp(set, value) == 0;
}

/* Room beyond the structure: that of 2.x has more members at its end. */
static void *spare(size_t size) {
    void *made = calloc(1, size + 256);
    if (made == NULL) abort();
    return made;
}

static struct fi_info *info_of(int nic, const struct fi_info *hints, const char *fabric) {
    struct fi_info *info = spare(sizeof(*info));
    struct fi_domain_attr *domain = info->domain_attr = spare(sizeof(*domain));
    char *name = NULL;
    info->tx_attr = spare(sizeof(*info->tx_attr));
    info->rx_attr = spare(sizeof(*info->rx_attr));
    info->ep_attr = spare(sizeof(*info->ep_attr));
    info->fabric_attr = spare(sizeof(*info->fabric_attr));
    info->caps = FI_MSG | FI_RMA | FI_READ | FI_WRITE | FI_RECV | FI_SEND | FI_REMOTE_READ | FI_REMOTE_WRITE | FI_SOURCE
                 | FI_REMOTE_COMM;
    info->mode = FI_CONTEXT2 | (hints->mode & FI_RX_CQ_DATA);
    info->addr_format = FI_ADDR_EFA;
    info->src_addrlen = ADDRESS_BYTES;
    info->src_addr = spare(ADDRESS_BYTES);
    snprintf(info->src_addr, 16, "%.8s-%d", getenv("EFA_STANDIN_HOST") ? getenv("EFA_STANDIN_HOST") : "host", nic % 100);
    *info->tx_attr = (struct fi_tx_attr){.caps = info->caps, .mode = info->mode, .size = TX_DEPTH, .inject_size = INJECTED,
                                        .iov_limit = 1, .rma_iov_limit = 1};
    *info->rx_attr = (struct fi_rx_attr){.caps = info->caps, .mode = info->mode, .size = RX_DEPTH, .iov_limit = 1};
    info->ep_attr->type = FI_EP_RDM;
    info->ep_attr->protocol = FI_PROTO_EFA;
    info->ep_attr->protocol_version = 4;
    info->ep_attr->max_msg_size = (size_t)setting("EFA_STANDIN_RMA", 1 << 20);
    info->ep_attr->tx_ctx_cnt = info->ep_attr->rx_ctx_cnt = 1;
    if (asprintf(&name, "standin%d-rdm", nic) < 0) abort();
    domain->name = name;
    domain->threading = FI_THREAD_SAFE;
    domain->control_progress = domain->data_progress = FI_PROGRESS_AUTO;
    domain->av_type = FI_AV_TABLE;
    domain->mr_mode = MR_MODE;
    domain->mr_key_size = domain->cq_data_size = 4;
    domain->cq_cnt = domain->ep_cnt = (size_t)setting("EFA_STANDIN_QPS", 256);
    domain->mr_cnt = 1 << 16;
    info->fabric_attr->name = strdup(fabric);
    info->nic = spare(sizeof(*info->nic));
    info->nic->fid.fclass = FI_CLASS_NIC;
    info->nic->link_attr = spare(sizeof(*info->nic->link_attr));
    info->nic->link_attr->mtu = (size_t)setting("EFA_STANDIN_MTU", 8192);
    info->nic->link_attr->speed = 100000000000;
    info->nic->link_attr->state = FI_LINK_UP;
    return info;
}

static int nic_close(struct fid *fid) {
    struct fid_nic *nic = OF(struct fid_nic, fid, fid);
    free(nic->link_attr);
    free(nic);
    return 0;
}

static int control_nothing(struct fid *fid, int command, void *arg);
static struct fid_nic *nic_dup(const struct fid_nic *of);

static int nic_control(struct fid *fid, int command, void *arg) {
    if (command != FI_DUP) return -FI_ENOSYS;
    *(struct fid_nic **)arg = nic_dup(OF(struct fid_nic, fid, fid));
    return 0;
}

static struct fi_ops nic_ops = {.size = sizeof(struct fi_ops), .close = nic_close, .control = nic_control};

static struct fid_nic *nic_dup(const struct fid_nic *of) {
    struct fid_nic *nic = spare(sizeof(*nic));
    nic->fid.fclass = FI_CLASS_NIC;
    nic->fid.ops = &nic_ops;
    nic->link_attr = spare(sizeof(*nic->link_attr));
    *nic->link_attr = *of->link_attr;
    return nic;
}

static bool fits(const struct fi_info *hints, const struct fi_info *info) {
    uint64_t wanted = hints->caps & (FI_HMEM | FI_TAGGED | FI_ATOMIC | FI_LOCAL_COMM);
    if (wanted || (hints->caps & FI_RMA && is("EFA_STANDIN", "no-write"))) return false;
    if (hints->ep_attr != NULL && hints->ep_attr->type != FI_EP_UNSPEC && hints->ep_attr->type != FI_EP_RDM) return false;
    if (!(hints->mode & FI_CONTEXT2) || (hints->tx_attr != NULL && hints->tx_attr->size > TX_DEPTH)) return false;
    if (hints->addr_format && hints->addr_format != FI_ADDR_EFA) return false;
    if (hints->domain_attr != NULL && (hints->domain_attr->mr_mode & MR_MODE) != MR_MODE) return false;
    if (hints->domain_attr != NULL && hints->domain_attr->name != NULL && strcmp(hints->domain_attr->name, info->domain_attr->name))
        return false;
    return hints->fabric_attr == NULL || hints->fabric_attr->name == NULL || !strcmp(hints->fabric_attr->name, info->fabric_attr->name);
}

static void info_free(struct fi_info *info) {
    free(info->src_addr);
    free(info->tx_attr);
    free(info->rx_attr);
    free(info->ep_attr);
    free(info->domain_attr->name);
    free(info->domain_attr);
    free(info->fabric_attr->name);
    free(info->fabric_attr);
    nic_close(&info->nic->fid);
    free(info);
}

static int standin_getinfo(uint32_t version, const char *node, const char *service, uint64_t flags,
                           const struct fi_info *hints, struct fi_info **found) {
    struct fi_info **end = found;
    (void)version, (void)service, (void)flags;
    *found = NULL;
    if (hints == NULL || node != NULL) return -FI_ENODATA;
    for (int nic = 0; nic < setting("EFA_STANDIN_NICS", 1); nic++) {
        struct fi_info *info = info_of(nic, hints, is("EFA_STANDIN", "old") ? "efa" : "efa-direct");
        info->nic->fid.ops = &nic_ops;
        if (is("EFA_STANDIN", "unsolicited")) info->mode &= ~FI_RX_CQ_DATA; /* before 2.4 nobody knows that mode */
        if (fits(hints, info)) {
            *end = info;
            end = &info->next;
        } else
            info_free(info);
    }
    return *found == NULL ? -FI_ENODATA : 0;
}

/* Objects. */

static int control_nothing(struct fid *fid, int command, void *arg) {
    (void)fid, (void)command, (void)arg;
    return -FI_ENOSYS;
}

static int close_memory(struct fid *fid) {
    struct memory *self = OF(struct memory, mr.fid, fid), **at = &self->device->memories;
    pthread_mutex_lock(&self->device->lock);
    while (*at != self) at = &(*at)->next;
    *at = self->next;
    pthread_mutex_unlock(&self->device->lock);
    free(self);
    return 0;
}

static struct fi_ops memory_ops = {.size = sizeof(struct fi_ops), .close = close_memory, .control = control_nothing};

static int open_memory(struct fid *fid, const void *buffer, size_t length, uint64_t access, uint64_t offset, uint64_t key,
                       uint64_t flags, struct fid_mr **mr, void *context) {
    struct device *device = OF(struct device, domain.fid, fid);
    static atomic_ullong made; /* of this process */
    struct memory *self = spare(sizeof(*self)), *other;
    (void)offset, (void)flags;
    *self = (struct memory){.device = device, .address = (uintptr_t)buffer, .length = length, .access = access};
    /* Local access gives remote read (efa_mr_ofi_to_ibv_access). */
    if (access & FI_SEND && strict(STRICT_RIGHTS)) self->access |= FI_REMOTE_READ;
    self->mr.fid = (struct fid){.fclass = FI_CLASS_MR, .context = context, .ops = &memory_ops};
    pthread_mutex_lock(&device->lock);
    /* The lowest of this NIC's that is free: used again at once. */
    for (key = 1 + 1000 * (uint64_t)device->nic + (strict(STRICT_REUSE) ? 0 : 1000000 * ++made), other = device->memories; other != NULL;)
        if (other->mr.key == key) {
            key++;
            other = device->memories;
        } else
            other = other->next;
    self->mr.key = key;
    self->mr.mem_desc = self;
    self->next = device->memories;
    device->memories = self;
    pthread_mutex_unlock(&device->lock);
    *mr = &self->mr;
    return 0;
}

static struct fi_ops_mr memory_table = {.size = sizeof(struct fi_ops_mr), .reg = open_memory};

/* What the process has not read although it is there: as if the scheduler kept it from here. */
static bool hidden(const struct queue *self) {
    return self->count && fault_of(self->device, HIDE) && self->ring[self->first].what.flags & FI_REMOTE_CQ_DATA;
}

static ssize_t read_queue(struct fid_cq *cq, void *buffer, size_t count) {
    struct queue *self = OF(struct queue, cq, cq);
    struct fi_cq_data_entry *out = buffer;
    ssize_t got = 0;
    bool hides;
    pthread_mutex_lock(&self->device->lock);
    for (hides = hidden(self); !hides && got < (ssize_t)count && self->count; got++, hides = hidden(self)) {
        const struct fi_cq_err_entry *what = &self->ring[self->first].what;
        if (what->err) break;
        if (!strict(STRICT_DISCARD) && what->flags & FI_REMOTE_CQ_DATA) tell_read(self->ring[self->first].of, what->op_context);
        out[got] = (struct fi_cq_data_entry){what->op_context, what->flags, what->len, NULL, what->data};
        self->first = (self->first + 1) % self->size;
        self->count--;
    }
    if (got == 0) got = self->count && !hides ? -FI_EAVAIL : -FI_EAGAIN;
    pthread_mutex_unlock(&self->device->lock);
    return got;
}

static ssize_t read_error(struct fid_cq *cq, struct fi_cq_err_entry *out, uint64_t flags) {
    struct queue *self = OF(struct queue, cq, cq);
    ssize_t got = -FI_EAGAIN;
    (void)flags;
    pthread_mutex_lock(&self->device->lock);
    if (self->count && self->ring[self->first].what.err) {
        *out = self->ring[self->first].what;
        self->first = (self->first + 1) % self->size;
        self->count--;
        got = 1;
    }
    pthread_mutex_unlock(&self->device->lock);
    return got;
}

static int close_queue(struct fid *fid) {
    struct queue *self = OF(struct queue, cq.fid, fid);
    close(self->event);
    free(self->ring);
    free(self);
    return 0;
}

static int control_queue(struct fid *fid, int command, void *arg) {
    struct queue *self = OF(struct queue, cq.fid, fid);
    if (command != FI_GETWAIT) return -FI_ENOSYS;
    *(int *)arg = self->event;
    return 0;
}

static struct fi_ops queue_ops = {.size = sizeof(struct fi_ops), .close = close_queue, .control = control_queue};
static struct fi_ops_cq queue_table = {.size = sizeof(struct fi_ops_cq), .read = read_queue, .readerr = read_error};

static int open_queue(struct fid_domain *domain, struct fi_cq_attr *attr, struct fid_cq **cq, void *context) {
    struct queue *self;
    if (attr->wait_obj != FI_WAIT_NONE && (attr->wait_obj != FI_WAIT_FD || is("EFA_STANDIN", "no-wait"))) return -FI_ENOSYS;
    self = spare(sizeof(*self));
    self->device = OF(struct device, domain, domain);
    self->size = attr->size ? attr->size : 12288;
    self->ring = calloc(self->size, sizeof(*self->ring));
    self->event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    self->cq.fid = (struct fid){.fclass = FI_CLASS_CQ, .context = context, .ops = &queue_ops};
    self->cq.ops = &queue_table;
    attr->size = self->size;
    *cq = &self->cq;
    return 0;
}

static int close_vector(struct fid *fid) {
    struct vector *self = OF(struct vector, av.fid, fid), **at = &self->device->vectors;
    pthread_mutex_lock(&self->device->lock);
    while (*at != self) at = &(*at)->next;
    *at = self->next;
    pthread_mutex_unlock(&self->device->lock);
    free(self->entries);
    free(self->used);
    free(self);
    return 0;
}

static int insert(struct fid_av *av, const void *addresses, size_t count, fi_addr_t *out, uint64_t flags, void *context) {
    struct vector *self = OF(struct vector, av, av);
    (void)flags, (void)context;
    pthread_mutex_lock(&self->device->lock);
    for (size_t i = 0; i < count; i++) {
        size_t at = 0;
        while (at < AV_ENTRIES && self->used[at]) at++;
        if (at == AV_ENTRIES) {
            pthread_mutex_unlock(&self->device->lock);
            return -FI_ENOMEM;
        }
        self->used[at] = true;
        self->entries[at] = ((const struct address *)addresses)[i];
        if (at >= self->top) self->top = at + 1;
        out[i] = at;
    }
    pthread_mutex_unlock(&self->device->lock);
    return (int)count;
}

static int take_away(struct fid_av *av, fi_addr_t *which, size_t count, uint64_t flags) {
    struct vector *self = OF(struct vector, av, av);
    (void)flags;
    pthread_mutex_lock(&self->device->lock);
    for (size_t i = 0; i < count; i++) self->used[which[i]] = false;
    pthread_mutex_unlock(&self->device->lock);
    return 0;
}

static struct fi_ops vector_ops = {.size = sizeof(struct fi_ops), .close = close_vector, .control = control_nothing};
static struct fi_ops_av vector_table = {.size = sizeof(struct fi_ops_av), .insert = insert, .remove = take_away};

static int open_vector(struct fid_domain *domain, struct fi_av_attr *attr, struct fid_av **av, void *context) {
    struct vector *self = spare(sizeof(*self));
    (void)attr;
    self->device = OF(struct device, domain, domain);
    self->entries = calloc(AV_ENTRIES, sizeof(*self->entries));
    self->used = calloc(AV_ENTRIES, sizeof(*self->used));
    self->av.fid = (struct fid){.fclass = FI_CLASS_AV, .context = context, .ops = &vector_ops};
    self->av.ops = &vector_table;
    pthread_mutex_lock(&self->device->lock);
    self->next = self->device->vectors;
    self->device->vectors = self;
    pthread_mutex_unlock(&self->device->lock);
    *av = &self->av;
    return 0;
}

static int close_endpoint(struct fid *fid) {
    static struct endpoint *closed[32];
    static unsigned at;
    struct endpoint *self = OF(struct endpoint, ep.fid, fid), **place;
    endpoint_end(self);
    /* Kept for a while, and of no use: whoever posts on a closed endpoint crashes, whatever its memory would be by now. */
    memset(self, 0xEE, sizeof(*self));
    place = &closed[__atomic_fetch_add(&at, 1, __ATOMIC_RELAXED) % 32];
    free(__atomic_exchange_n(place, self, __ATOMIC_ACQ_REL));
    return 0;
}

static int bind_endpoint(struct fid *fid, struct fid *to, uint64_t flags) {
    struct endpoint *self = OF(struct endpoint, ep.fid, fid);
    (void)flags;
    if (to->fclass == FI_CLASS_CQ) self->queue = OF(struct queue, cq.fid, to);
    if (to->fclass == FI_CLASS_AV) self->vector = OF(struct vector, av.fid, to);
    return 0;
}

static int control_endpoint(struct fid *fid, int command, void *arg) {
    struct endpoint *self = OF(struct endpoint, ep.fid, fid);
    (void)arg;
    if (command != FI_ENABLE) return -FI_ENOSYS;
    return self->queue == NULL || self->vector == NULL ? -FI_ENOAV : endpoint_enable(self);
}

static int get_name(struct fid *fid, void *address, size_t *length) {
    struct endpoint *self = OF(struct endpoint, ep.fid, fid);
    size_t room = *length;
    *length = sizeof(self->name);
    memcpy(address, &self->name, room < sizeof(self->name) ? room : sizeof(self->name));
    return room < sizeof(self->name) ? -FI_ETOOSMALL : 0;
}

static ssize_t do_recv(struct fid_ep *ep, void *buffer, size_t length, void *desc, fi_addr_t from, void *context) {
    (void)desc, (void)from;
    return post_receive(OF(struct endpoint, ep, ep), buffer, length, context);
}

static ssize_t do_recvmsg(struct fid_ep *ep, const struct fi_msg *m, uint64_t flags) {
    (void)flags;
    return post_receive(OF(struct endpoint, ep, ep), m->msg_iov[0].iov_base, m->msg_iov[0].iov_len, m->context);
}

static ssize_t do_sendmsg(struct fid_ep *ep, const struct fi_msg *m, uint64_t flags) {
    return post_op(OF(struct endpoint, ep, ep), SEND, m->msg_iov, m->iov_count, m->addr, 0, 0, flags | FI_MSG | FI_SEND, 0, m->context);
}

static ssize_t do_writemsg(struct fid_ep *ep, const struct fi_msg_rma *m, uint64_t flags) {
    return post_op(OF(struct endpoint, ep, ep), WRITE, m->msg_iov, m->iov_count, m->addr, m->rma_iov[0].addr, m->rma_iov[0].key,
                   flags | FI_RMA | FI_WRITE, (uint32_t)m->data, m->context);
}

static ssize_t do_readmsg(struct fid_ep *ep, const struct fi_msg_rma *m, uint64_t flags) {
    return post_op(OF(struct endpoint, ep, ep), READ, m->msg_iov, m->iov_count, m->addr, m->rma_iov[0].addr, m->rma_iov[0].key,
                   flags | FI_RMA | FI_READ, 0, m->context);
}

static struct fi_ops endpoint_ops = {
    .size = sizeof(struct fi_ops), .close = close_endpoint, .bind = bind_endpoint, .control = control_endpoint};
static struct fi_ops_cm name_table = {.size = sizeof(struct fi_ops_cm), .getname = get_name};
static struct fi_ops_msg message_table = {
    .size = sizeof(struct fi_ops_msg), .recv = do_recv, .recvmsg = do_recvmsg, .sendmsg = do_sendmsg};
static struct fi_ops_rma write_table = {.size = sizeof(struct fi_ops_rma), .writemsg = do_writemsg, .readmsg = do_readmsg};
static struct fi_ops_ep endpoint_table = {.size = sizeof(struct fi_ops_ep)};

static int open_endpoint(struct fid_domain *domain, struct fi_info *info, struct fid_ep **ep, void *context) {
    struct endpoint *self = spare(sizeof(*self));
    (void)info;
    self->device = OF(struct device, domain, domain);
    self->socket = -1;
    self->ep.fid = (struct fid){.fclass = FI_CLASS_EP, .context = context, .ops = &endpoint_ops};
    self->ep.ops = &endpoint_table;
    self->ep.cm = &name_table;
    self->ep.msg = &message_table;
    self->ep.rma = &write_table;
    *ep = &self->ep;
    return 0;
}

static int close_domain(struct fid *fid) {
    struct device *self = OF(struct device, domain.fid, fid);
    if (self->endpoints != NULL || self->memories != NULL) return -FI_EBUSY;
    device_stop(self);
    free(self);
    return 0;
}

static struct fi_ops domain_ops = {.size = sizeof(struct fi_ops), .close = close_domain, .control = control_nothing};
static struct fi_ops_domain domain_table = {
    .size = sizeof(struct fi_ops_domain), .av_open = open_vector, .cq_open = open_queue, .endpoint = open_endpoint};

static int open_domain(struct fid_fabric *fabric, struct fi_info *info, struct fid_domain **domain, void *context) {
    struct device *self = spare(sizeof(*self));
    (void)fabric;
    self->domain.fid = (struct fid){.fclass = FI_CLASS_DOMAIN, .context = context, .ops = &domain_ops};
    self->domain.ops = &domain_table;
    self->domain.mr = &memory_table;
    memcpy(self->gid, info->src_addr, sizeof(self->gid));
    self->nic = atoi(info->domain_attr->name + strlen("standin"));
    *domain = &self->domain;
    return device_start(self);
}

/* Arms each queue once; only then does its descriptor tell of something. */
static int trywait(struct fid_fabric *fabric, struct fid **fids, int count) {
    int code = 0;
    (void)fabric;
    for (int i = 0; i < count; i++) {
        struct queue *queue = OF(struct queue, cq.fid, fids[i]);
        uint64_t value;
        pthread_mutex_lock(&queue->device->lock);
        if (read(queue->event, &value, sizeof(value)) < 0 && errno != EAGAIN) abort();
        queue->armed = queue->count == 0 || hidden(queue);
        if (!queue->armed) code = -FI_EAGAIN;
        pthread_mutex_unlock(&queue->device->lock);
    }
    return code;
}

static int close_fabric(struct fid *fid) {
    free(OF(struct fid_fabric, fid, fid));
    return 0;
}

static struct fi_ops fabric_ops = {.size = sizeof(struct fi_ops), .close = close_fabric, .control = control_nothing};
static struct fi_ops_fabric fabric_table = {.size = sizeof(struct fi_ops_fabric), .domain = open_domain, .trywait = trywait};

static int standin_fabric(struct fi_fabric_attr *attr, struct fid_fabric **fabric, void *context) {
    struct fid_fabric *self = spare(sizeof(*self));
    self->fid = (struct fid){.fclass = FI_CLASS_FABRIC, .context = context, .ops = &fabric_ops};
    self->ops = &fabric_table;
    self->api_version = attr->api_version;
    *fabric = self;
    return 0;
}

static struct fi_provider provider = {
    .version = FI_VERSION(1, 0), .name = "efa", .getinfo = standin_getinfo, .fabric = standin_fabric};

__attribute__((visibility("default"))) struct fi_provider *fi_prov_ini(void) {
    provider.fi_version = FI_VERSION(1, setting("EFA_STANDIN_API", 17));
    return &provider;
}
