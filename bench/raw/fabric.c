/* Endpoints, memory and completion queues. libfabric is opened at run time, as aiote opens it, so that both sides of a
 * comparison can be given the same file. */
#include "raw.h"

#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

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
    void *library = dlopen(self->library, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) fail("%s", dlerror());
    *(void **)&getinfo = find(library, "fi_getinfo", "FABRIC_1.3");
    *(void **)&freeinfo = find(library, "fi_freeinfo", "FABRIC_1.3");
    *(void **)&dupinfo = find(library, "fi_dupinfo", "FABRIC_1.3");
    *(void **)&fabric = find(library, "fi_fabric", "FABRIC_1.1");
    *(void **)&error_text = find(library, "fi_strerror", "FABRIC_1.0");
    self->version = ((uint32_t (*)(void))find(library, "fi_version", "FABRIC_1.0"))();
}

void check(int64_t code, const char *what) {
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

void fabric_open(struct raw *self) {
    char *names = strdup(self->rails), *rest = names, *name;
    load(self);
    while ((name = strsep(&rest, ",")) != NULL && self->rail_count < MAX_RAILS)
        open_rail(self, &self->rail[self->rail_count++], name);
    free(names);
}

void fabric_card(struct raw *self, int i, struct card *out) {
    struct rail *rail = &self->rail[i];
    size_t length = NAME_BYTES;
    memset(out, 0, sizeof(*out));
    out->key = fi_mr_key(rail->memory);
    out->base = rail->info->domain_attr->mr_mode & FI_MR_VIRT_ADDR ? (uint64_t)(uintptr_t)self->arena : 0;
    check(fi_getname(&rail->endpoint->fid, out->name, &length), "fi_getname");
    out->length = (uint32_t)length;
    snprintf(out->wire, sizeof(out->wire), "%s", rail->info->fabric_attr->prov_name);
}

void fabric_connect(struct raw *self, int i, const struct card *peer) {
    struct rail *rail = &self->rail[i];
    int inserted;
    if (strncmp(rail->info->fabric_attr->prov_name, peer->wire, sizeof(peer->wire)) != 0)
        fail("%s here cannot talk to the other side's: both need libfabrics of one kind", rail->info->fabric_attr->prov_name);
    inserted = fi_av_insert(rail->vector, peer->name, 1, &rail->peer, 0, NULL);
    check(inserted, "fi_av_insert");
    if (inserted != 1) fail("fi_av_insert refused the peer's address");
    rail->remote_key = peer->key;
    rail->remote_base = peer->base;
}

void fabric_close(struct raw *self) {
    for (int i = 0; i < self->rail_count; i++) {
        struct rail *rail = &self->rail[i];
        fi_close(&rail->endpoint->fid);
        fi_close(&rail->memory->fid);
        fi_close(&rail->queue->fid);
        fi_close(&rail->vector->fid);
        fi_close(&rail->domain->fid);
        fi_close(&rail->fabric->fid);
        freeinfo(rail->info);
    }
}

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

int post(struct raw *self, int i, struct work *work, uint64_t local, uint64_t remote, size_t size, int64_t immediate) {
    struct rail *rail = &self->rail[i];
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
    if (code == 0 && work->what != RECEIVE) self->outstanding++;
    return code;
}

static void handle(struct raw *self, struct fi_cq_data_entry *entry) {
    struct work *work = entry->op_context;
    if (entry->flags & FI_REMOTE_CQ_DATA) {
        if (entry->data == END) self->ended++;
        else self->counted++;
        return;
    }
    if (work->what == RECEIVE) self->received++;
    else self->outstanding--;
    if (self->on_done != NULL && work->what != CONTROL) self->on_done(self, work);
    else work_give(self, work);
}

int poll_all(struct raw *self) {
    struct fi_cq_data_entry entry[BATCH];
    int total = 0;
    for (int i = 0; i < self->rail_count; i++) {
        ssize_t got = fi_cq_read(self->rail[i].queue, entry, BATCH);
        if (got == -FI_EAVAIL) {
            struct fi_cq_err_entry error = {0};
            fi_cq_readerr(self->rail[i].queue, &error, 0);
            fail("a completion failed: %s", error_text(error.err));
        }
        if (got == -FI_EAGAIN) continue;
        check(got, "fi_cq_read");
        for (ssize_t j = 0; j < got; j++) handle(self, &entry[j]);
        total += (int)got;
    }
    return total;
}

/* shm has no wait descriptor: whoever posted or took something wakes the other through an eventfd. */
void ring(struct raw *self) {
    uint64_t one = 1;
    if (self->peer_bell >= 0 && write(self->peer_bell, &one, sizeof(one)) < 0 && errno != EAGAIN) fail("bell");
}

static bool armed(struct raw *self) {
    for (int i = 0; i < self->rail_count; i++) {
        struct fid *queue = &self->rail[i].queue->fid;
        if (self->rail[i].descriptor >= 0 && fi_trywait(self->rail[i].fabric, &queue, 1) != 0) return false;
    }
    return true;
}

void progress(struct raw *self) {
    struct pollfd set[MAX_RAILS + 1];
    uint64_t rung;
    int count = 0;
    if (poll_all(self) > 0) {
        ring(self);
        return;
    }
    if (!self->sleeps) return;
    if (self->own_bell >= 0 && read(self->own_bell, &rung, sizeof(rung)) > 0) return;
    if (!armed(self)) return;
    for (int i = 0; i < self->rail_count; i++)
        if (self->rail[i].descriptor >= 0)
            set[count++] = (struct pollfd){.fd = self->rail[i].descriptor, .events = POLLIN};
    if (self->own_bell >= 0) set[count++] = (struct pollfd){.fd = self->own_bell, .events = POLLIN};
    poll(set, (nfds_t)count, 100);
}

void post_receives(struct raw *self) {
    for (uint64_t i = 0; i < RECEIVES && !self->receives; i++) {
        struct work *work = work_take(self, RECEIVE, i);
        while (post(self, 0, work, i * MESSAGE_BYTES, 0, MESSAGE_BYTES, -1) == -FI_EAGAIN) poll_all(self);
    }
    self->receives = true;
}
