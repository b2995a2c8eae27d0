/* Rails of libfabric: endpoints, memory and completion queues. It is opened at run time, as aiote opens it, so that
 * both sides of a comparison can be given the same file. */
#include "raw.h"

#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

_Static_assert(sizeof(struct fi_context2) <= sizeof(((struct work *)NULL)->context), "work has room for a context");
_Static_assert(FI_EAGAIN == EAGAIN, "the loops know one code of a full queue");

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

static struct rail rails[MAX_RAILS];
static int (*getinfo)(uint32_t, const char *, const char *, uint64_t, const struct fi_info *, struct fi_info **);
static void (*freeinfo)(struct fi_info *);
static struct fi_info *(*dupinfo)(const struct fi_info *);
static int (*fabric)(struct fi_fabric_attr *, struct fid_fabric **, void *);
static const char *(*error_text)(int);

/* The symbol versions of the headers' ABI (1.17): a later library's default ones are for larger structures. */
static void *find(void *library, const char *name, const char *version) {
    void *symbol = dlvsym(library, name, version);
    if (symbol == NULL) fail("%s@%s is missing: not a libfabric 1.x or 2.x", name, version);
    return symbol;
}

static void load(struct raw *self) {
    void *library = dlopen(*self->library ? self->library : "libfabric.so.1", RTLD_NOW | RTLD_LOCAL);
    uint32_t version;
    if (library == NULL) fail("%s", dlerror());
    *(void **)&getinfo = find(library, "fi_getinfo", "FABRIC_1.3");
    *(void **)&freeinfo = find(library, "fi_freeinfo", "FABRIC_1.3");
    *(void **)&dupinfo = find(library, "fi_dupinfo", "FABRIC_1.3");
    *(void **)&fabric = find(library, "fi_fabric", "FABRIC_1.1");
    *(void **)&error_text = find(library, "fi_strerror", "FABRIC_1.0");
    version = ((uint32_t (*)(void))find(library, "fi_version", "FABRIC_1.0"))();
    snprintf(self->version, sizeof(self->version), "libfabric %u.%u", FI_MAJOR(version), FI_MINOR(version));
}

static void check(int64_t code, const char *what) {
    if (code < 0) fail("%s: %s", what, error_text ? error_text((int)-code) : strerror((int)-code));
}

static struct fi_info *query(struct raw *self, const char *domain) {
    struct fi_info *hints = dupinfo(NULL), *found = NULL;
    bool tcp = strcmp(self->provider, "shm") != 0;
    if (hints == NULL) fail("out of memory");
    hints->caps = FI_MSG | FI_RMA;
    hints->mode = FI_CONTEXT | FI_CONTEXT2;
    hints->ep_attr->type = FI_EP_RDM;
    hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
    hints->domain_attr->threading = FI_THREAD_DOMAIN;
    hints->fabric_attr->prov_name = strdup(self->provider);
    if (tcp) hints->addr_format = FI_SOCKADDR_IN;
    if (*domain) hints->domain_attr->name = strdup(domain);
    check(getinfo(FI_VERSION(1, 17), tcp && !*domain ? self->host : NULL, NULL, tcp && !*domain ? FI_SOURCE : 0, hints,
                  &found), "fi_getinfo");
    freeinfo(hints);
    return found;
}

static void open_rail(struct raw *self, struct rail *rail, const char *domain) {
    struct fi_cq_attr queue = {.size = 4096, .format = FI_CQ_FORMAT_DATA};
    struct fi_av_attr vector = {.type = FI_AV_TABLE, .count = 1};
    uint64_t access = FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE | FI_SEND | FI_RECV, key;
    bool waits = self->sleeps && strcmp(self->provider, "shm") != 0;
    queue.wait_obj = waits ? FI_WAIT_FD : FI_WAIT_NONE;
    rail->info = query(self, domain);
    rail->descriptor = -1;
    if (getrandom(&key, sizeof(key), 0) != sizeof(key)) fail("getrandom");
    check(fabric(rail->info->fabric_attr, &rail->fabric, NULL), "fi_fabric");
    check(fi_domain(rail->fabric, rail->info, &rail->domain, NULL), "fi_domain");
    check(fi_endpoint(rail->domain, rail->info, &rail->endpoint, NULL), "fi_endpoint");
    check(fi_cq_open(rail->domain, &queue, &rail->queue, NULL), "fi_cq_open");
    check(fi_av_open(rail->domain, &vector, &rail->vector, NULL), "fi_av_open");
    check(fi_ep_bind(rail->endpoint, &rail->queue->fid, FI_TRANSMIT | FI_RECV), "fi_ep_bind");
    check(fi_ep_bind(rail->endpoint, &rail->vector->fid, 0), "fi_ep_bind");
    check(fi_enable(rail->endpoint), "fi_enable");
    if (waits) check(fi_control(&rail->queue->fid, FI_GETWAIT, &rail->descriptor), "fi_control(FI_GETWAIT)");
    check(fi_mr_reg(rail->domain, self->arena, self->arena_bytes, access, 0, key >> 1, 0, &rail->memory, NULL),
          "fi_mr_reg");
}

static void fabric_open(struct raw *self) {
    char *names = strdup(self->rails), *rest = names, *name;
    load(self);
    while ((name = strsep(&rest, ",")) != NULL && self->rail_count < MAX_RAILS)
        open_rail(self, &rails[self->rail_count++], name);
    free(names);
}

static void fabric_card(struct raw *self, int i, struct card *out) {
    struct rail *rail = &rails[i];
    size_t length = NAME_BYTES;
    memset(out, 0, sizeof(*out));
    out->key = fi_mr_key(rail->memory);
    out->base = rail->info->domain_attr->mr_mode & FI_MR_VIRT_ADDR ? (uint64_t)(uintptr_t)self->arena : 0;
    check(fi_getname(&rail->endpoint->fid, out->name, &length), "fi_getname");
    out->length = (uint32_t)length;
    snprintf(out->wire, sizeof(out->wire), "%s", rail->info->fabric_attr->prov_name);
}

static void fabric_connect(struct raw *self, int i, const struct card *peer) {
    struct rail *rail = &rails[i];
    int inserted;
    (void)self;
    if (strncmp(rail->info->fabric_attr->prov_name, peer->wire, sizeof(peer->wire)) != 0)
        fail("%s here cannot talk to the other side's: both need libfabrics of one kind", rail->info->fabric_attr->prov_name);
    inserted = fi_av_insert(rail->vector, peer->name, 1, &rail->peer, 0, NULL);
    check(inserted, "fi_av_insert");
    if (inserted != 1) fail("fi_av_insert refused the peer's address");
    rail->remote_key = peer->key;
    rail->remote_base = peer->base;
}

static void fabric_close(struct raw *self) {
    for (int i = 0; i < self->rail_count; i++) {
        struct rail *rail = &rails[i];
        fi_close(&rail->endpoint->fid);
        fi_close(&rail->memory->fid);
        fi_close(&rail->queue->fid);
        fi_close(&rail->vector->fid);
        fi_close(&rail->domain->fid);
        fi_close(&rail->fabric->fid);
        freeinfo(rail->info);
    }
}

static int post_rma(struct rail *rail, struct work *work, struct iovec *local, void **desc, uint64_t remote,
                    int64_t immediate) {
    struct fi_rma_iov target = {.addr = rail->remote_base + remote, .len = local->iov_len, .key = rail->remote_key};
    struct fi_msg_rma message = {
        .msg_iov = local, .desc = desc, .iov_count = 1, .addr = rail->peer, .rma_iov = &target, .rma_iov_count = 1,
        .context = work, .data = immediate < 0 ? 0 : (uint64_t)immediate,
    };
    if (work->what == READ) return (int)fi_readmsg(rail->endpoint, &message, FI_COMPLETION);
    return (int)fi_writemsg(rail->endpoint, &message,
                            FI_COMPLETION | FI_DELIVERY_COMPLETE | (immediate < 0 ? 0 : FI_REMOTE_CQ_DATA));
}

static int fabric_post(struct raw *self, int i, struct work *work, uint64_t local, uint64_t remote, size_t size,
                       int64_t immediate) {
    struct rail *rail = &rails[i];
    struct iovec vector = {.iov_base = self->arena + local, .iov_len = size};
    void *desc = fi_mr_desc(rail->memory);
    int code;
    if (work->what == SEND) {
        struct fi_msg message = {.msg_iov = &vector, .desc = &desc, .iov_count = 1, .addr = rail->peer, .context = work};
        code = (int)fi_sendmsg(rail->endpoint, &message, FI_COMPLETION);
    } else if (work->what == RECEIVE) {
        code = (int)fi_recv(rail->endpoint, self->arena + local, size, desc, FI_ADDR_UNSPEC, work);
    } else {
        code = post_rma(rail, work, &vector, &desc, remote, immediate);
    }
    if (code != 0 && code != -FI_EAGAIN) check(code, "post");
    return code;
}

static int fabric_poll(struct raw *self) {
    struct fi_cq_data_entry entry[BATCH];
    int total = 0;
    for (int i = 0; i < self->rail_count; i++) {
        ssize_t got = fi_cq_read(rails[i].queue, entry, BATCH);
        if (got == -FI_EAVAIL) {
            struct fi_cq_err_entry error = {0};
            fi_cq_readerr(rails[i].queue, &error, 0);
            fail("a completion failed: %s", error_text(error.err));
        }
        if (got == -FI_EAGAIN) continue;
        check(got, "fi_cq_read");
        for (ssize_t j = 0; j < got; j++) {
            if (entry[j].flags & FI_REMOTE_CQ_DATA) arrived(self, entry[j].data);
            else completed(self, entry[j].op_context);
        }
        total += (int)got;
    }
    return total;
}

/* shm has no wait descriptor: whoever posted or took something wakes the other through an eventfd. */
static void wake_peer(struct raw *self) {
    uint64_t one = 1;
    if (self->peer_eventfd >= 0 && write(self->peer_eventfd, &one, sizeof(one)) < 0 && errno != EAGAIN) fail("eventfd");
}

static bool armed(struct raw *self) {
    for (int i = 0; i < self->rail_count; i++) {
        struct fid *queue = &rails[i].queue->fid;
        if (rails[i].descriptor >= 0 && fi_trywait(rails[i].fabric, &queue, 1) != 0) return false;
    }
    return true;
}

static void fabric_sleep(struct raw *self) {
    struct pollfd set[MAX_RAILS + 1];
    uint64_t woken;
    int count = 0;
    if (self->own_eventfd >= 0 && read(self->own_eventfd, &woken, sizeof(woken)) > 0) return;
    if (!armed(self)) return;
    for (int i = 0; i < self->rail_count; i++)
        if (rails[i].descriptor >= 0)
            set[count++] = (struct pollfd){.fd = rails[i].descriptor, .events = POLLIN};
    if (self->own_eventfd >= 0) set[count++] = (struct pollfd){.fd = self->own_eventfd, .events = POLLIN};
    poll(set, (nfds_t)count, 100);
}

const struct kind fabric_kind = {
    .open = fabric_open, .card = fabric_card, .connect = fabric_connect, .post = fabric_post, .flush = wake_peer,
    .poll = fabric_poll, .sleep = fabric_sleep, .close = fabric_close,
};
