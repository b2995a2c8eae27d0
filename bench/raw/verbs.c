/* Rails of libibverbs: reliable connected queue pairs, opened at run time as the other kind's library is.
 *
 * Work requests are chained until they are flushed; of a chain the last tells of its end, and every `stride`-th, so
 * that a window is never over all at once. One queue pair carries writes and reads, another messages: an immediate uses
 * up a receive of its pair, and must not take one that a message is to come in. What answers a round trip is solicited:
 * who waits for it is not woken for the end of its own write. */
#include "raw.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

enum {
    DEPTH = 1024,        /* sends outstanding on a pair; a power of two */
    CHAIN = 64,          /* sends that are handed over at a time, and receives */
    IMMEDIATES = 4096,   /* receives for them */
    INLINE_BYTES = 128,
    MOST_READS = 16,
    TIMEOUT = 14,        /* 67 ms until a packet without an answer is sent again */
    RETRIES = 6,
    RNR_TIMER = 12,      /* 0.64 ms until a sender that found no receive tries again */
    FOR_EVER = 7,
    HOPS = 64,
};

enum armed { NOT_ARMED, FOR_SOLICITED, FOR_ALL };

/* One queue pair, and its sends that are not over, oldest first. */
struct lane {
    struct ibv_qp *pair;
    uint32_t number, psn, inline_bytes;
    struct work *ring[DEPTH];
    uint32_t head, tail, silent;  /* silent: sends in a row that tell of no end */
};

/* What the peer has to know of a rail to reach it. */
struct address {
    uint32_t number[2], psn[2];
    uint16_t lid;
    uint8_t mtu, reads, ethernet, gid[16];
};

struct rail {
    struct ibv_context *context;
    struct ibv_device_attr device;
    struct ibv_port_attr port;
    struct ibv_pd *domain, *parent;
    struct ibv_td *thread;
    struct ibv_mr *memory;
    struct ibv_comp_channel *channel;
    struct ibv_cq *queue;
    struct lane data, text;
    struct lane *chained;         /* whose chain it is */
    struct ibv_send_wr links[CHAIN];
    struct ibv_sge places[CHAIN];
    uint32_t chain, depth, immediates, missing, events;
    struct ibv_recv_wr receives[CHAIN];
    enum armed armed;
    union ibv_gid gid;
    int number, gid_index;
    uint64_t remote_base;
    uint32_t remote_key;
};

static struct rail rails[MAX_RAILS];

/* What the library exports, from the first version with today's structures; the rest of verbs.h is inline. */
#define EXPORTED(X) \
    X(get_device_list, "1.1") X(free_device_list, "1.1") X(get_device_name, "1.1") X(open_device, "1.1") \
    X(close_device, "1.1") X(query_device, "1.1") X(query_port, "1.1") X(query_gid, "1.1") X(alloc_pd, "1.1") \
    X(dealloc_pd, "1.1") X(reg_mr, "1.1") X(dereg_mr, "1.1") X(create_comp_channel, "1.0") \
    X(destroy_comp_channel, "1.0") X(create_cq, "1.1") X(destroy_cq, "1.1") X(get_cq_event, "1.1") \
    X(ack_cq_events, "1.1") X(create_qp, "1.1") X(modify_qp, "1.1") X(destroy_qp, "1.1") X(wc_status_str, "1.1")
#define DECLARE(name, version) __typeof__(ibv_##name) *name;
static struct {
    EXPORTED(DECLARE)
    __typeof__(ibv_reg_mr_iova2) *reg_mr_iova2;  /* not in old libraries */
} verbs;

static void *library;

static void *find(const char *name, const char *version) {
    void *symbol = dlvsym(library, name, version);
    if (symbol == NULL) fail("%s@%s is missing: not a libibverbs of rdma-core", name, version);
    return symbol;
}

static void load(struct raw *self) {
    library = dlopen(*self->library ? self->library : "libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) fail("%s", dlerror());
#define FIND(name, version) *(void **)&verbs.name = find("ibv_" #name, "IBVERBS_" version);
    EXPORTED(FIND)
    *(void **)&verbs.reg_mr_iova2 = dlvsym(library, "ibv_reg_mr_iova2", "IBVERBS_1.8");
    snprintf(self->version, sizeof(self->version), "libibverbs");
}

/* `failed` is what a call returned: an error number, or not 0 with errno set. */
static void check(int failed, const char *what) {
    if (failed) fail("%s: %s", what, strerror(failed > 0 ? failed : errno));
}

static void *made(void *object, const char *what) {
    if (object == NULL) fail("%s: %s", what, strerror(errno));
    return object;
}

static uint32_t least(uint64_t one, uint64_t other) { return (uint32_t)(one < other ? one : other); }

static struct ibv_context *open_device(const char *name) {
    struct ibv_device **list = made(verbs.get_device_list(NULL), "ibv_get_device_list");
    struct ibv_context *context = NULL;
    for (int i = 0; list[i] != NULL && context == NULL; i++)
        if (strcmp(verbs.get_device_name(list[i]), name) == 0)
            context = made(verbs.open_device(list[i]), "ibv_open_device");
    verbs.free_device_list(list);
    if (context == NULL) fail("libibverbs has no device %s", name);
    return context;
}

static void open_lane(struct rail *rail, struct lane *lane, uint32_t receives, int access) {
    struct ibv_qp_init_attr init;
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = (uint8_t)rail->number};
    for (uint32_t wanted = INLINE_BYTES;; wanted = 0) {
        init = (struct ibv_qp_init_attr){
            .send_cq = rail->queue, .recv_cq = rail->queue, .qp_type = IBV_QPT_RC,
            .cap = {.max_send_wr = rail->depth, .max_recv_wr = receives, .max_send_sge = 1, .max_recv_sge = 1,
                    .max_inline_data = wanted},
        };
        lane->pair = verbs.create_qp(rail->parent, &init);
        if (lane->pair != NULL || wanted == 0) break;
    }
    made(lane->pair, "ibv_create_qp");
    lane->inline_bytes = init.cap.max_inline_data;
    lane->number = lane->pair->qp_num;
    if (getrandom(&lane->psn, sizeof(lane->psn), 0) != sizeof(lane->psn)) fail("getrandom");
    lane->psn &= 0xFFFFFF;
    attr.qp_access_flags = (unsigned)access;
    check(verbs.modify_qp(lane->pair, &attr,
                          IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS), "ibv_modify_qp(INIT)");
}

/* Receives hold nothing; they are posted again in chains of a fixed length. */
static void refill(struct rail *rail) {
    struct ibv_recv_wr *bad;
    for (; rail->missing >= CHAIN; rail->missing -= CHAIN)
        check(ibv_post_recv(rail->data.pair, rail->receives, &bad), "ibv_post_recv");
}

static void register_arena(struct raw *self, struct rail *rail) {
    int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
    if (verbs.reg_mr_iova2 != NULL)
        rail->memory = verbs.reg_mr_iova2(rail->domain, self->arena, self->arena_bytes, (uintptr_t)self->arena,
                                          (unsigned)access | IBV_ACCESS_RELAXED_ORDERING);
    else
        rail->memory = verbs.reg_mr(rail->domain, self->arena, self->arena_bytes, access);
    made(rail->memory, "ibv_reg_mr");
}

/* One thread uses a rail, so it asks for queues without locks where the driver has such. */
static void open_domain(struct rail *rail) {
    struct ibv_td_init_attr thread = {0};
    struct ibv_parent_domain_init_attr parent = {0};
    rail->parent = rail->domain = made(verbs.alloc_pd(rail->context), "ibv_alloc_pd");
    rail->thread = ibv_alloc_td(rail->context, &thread);
    if (rail->thread == NULL) return;
    parent.pd = rail->domain;
    parent.td = rail->thread;
    rail->parent = ibv_alloc_parent_domain(rail->context, &parent);
    if (rail->parent == NULL) rail->parent = rail->domain;
}

static void open_rail(struct raw *self, struct rail *rail, const char *name) {
    char device[64];
    rail->number = 1;
    if (sscanf(name, "%63[^:]:%d:%d", device, &rail->number, &rail->gid_index) < 1)
        fail("a rail is named DEVICE, DEVICE:PORT or DEVICE:PORT:GID, not '%s'", name);
    rail->context = open_device(device);
    check(verbs.query_device(rail->context, &rail->device), "ibv_query_device");
    check((verbs.query_port)(rail->context, (uint8_t)rail->number, (void *)&rail->port), "ibv_query_port");
    check(verbs.query_gid(rail->context, (uint8_t)rail->number, rail->gid_index, &rail->gid), "ibv_query_gid");
    open_domain(rail);
    register_arena(self, rail);
    rail->depth = least(DEPTH, rail->device.max_qp_wr);
    rail->immediates = least(IMMEDIATES, rail->device.max_qp_wr) / CHAIN * CHAIN;
    if (self->sleeps) {
        rail->channel = made(verbs.create_comp_channel(rail->context), "ibv_create_comp_channel");
        /* A single channel is slept on by reading it; several, by a poll before. */
        if (strchr(self->rails, ',')) fcntl(rail->channel->fd, F_SETFL, O_NONBLOCK);
    }
    rail->queue = made(verbs.create_cq(rail->context, (int)(2 * rail->depth + rail->immediates + RECEIVES), NULL,
                                       rail->channel, 0), "ibv_create_cq");
    open_lane(rail, &rail->data, rail->immediates, IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ);
    open_lane(rail, &rail->text, RECEIVES, 0);
    for (int i = 0; i + 1 < CHAIN; i++) rail->receives[i].next = &rail->receives[i + 1];
    rail->missing = rail->immediates;
    refill(rail);
}

static void verbs_open(struct raw *self) {
    char *names = strdup(self->rails), *rest = names, *name;
    load(self);
    while ((name = strsep(&rest, ",")) != NULL && self->rail_count < MAX_RAILS)
        open_rail(self, &rails[self->rail_count++], name);
    free(names);
}

static void verbs_card(struct raw *self, int i, struct card *out) {
    struct rail *rail = &rails[i];
    struct address address = {
        .number = {rail->data.number, rail->text.number}, .psn = {rail->data.psn, rail->text.psn},
        .lid = rail->port.lid, .mtu = (uint8_t)rail->port.active_mtu,
        .reads = (uint8_t)least(rail->device.max_qp_rd_atom, MOST_READS),
        .ethernet = rail->port.link_layer == IBV_LINK_LAYER_ETHERNET,
    };
    memcpy(address.gid, rail->gid.raw, sizeof(address.gid));
    memset(out, 0, sizeof(*out));
    memcpy(out->name, &address, sizeof(address));
    out->length = sizeof(address);
    out->key = rail->memory->rkey;
    out->base = (uint64_t)(uintptr_t)self->arena;
    snprintf(out->wire, sizeof(out->wire), "verbs");
}

static void connect_lane(struct rail *rail, struct lane *lane, const struct address *peer, int which) {
    struct ibv_qp_attr attr = {
        .qp_state = IBV_QPS_RTR, .path_mtu = least(rail->port.active_mtu, peer->mtu),
        .dest_qp_num = peer->number[which], .rq_psn = peer->psn[which],
        .max_dest_rd_atomic = (uint8_t)least(rail->device.max_qp_rd_atom, MOST_READS), .min_rnr_timer = RNR_TIMER,
        .ah_attr = {.dlid = peer->lid, .port_num = (uint8_t)rail->number,
                    .is_global = peer->ethernet || memcmp(peer->gid, rail->gid.raw, 8) != 0,
                    .grh = {.sgid_index = (uint8_t)rail->gid_index, .hop_limit = HOPS}},
    };
    memcpy(attr.ah_attr.grh.dgid.raw, peer->gid, sizeof(peer->gid));
    check(verbs.modify_qp(lane->pair, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN
                          | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER), "ibv_modify_qp(RTR)");
    attr.qp_state = IBV_QPS_RTS;
    attr.timeout = TIMEOUT;
    attr.retry_cnt = RETRIES;
    attr.rnr_retry = FOR_EVER;
    attr.sq_psn = lane->psn;
    attr.max_rd_atomic = (uint8_t)least(rail->device.max_qp_init_rd_atom, peer->reads);
    check(verbs.modify_qp(lane->pair, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY
                          | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC), "ibv_modify_qp(RTS)");
}

static void verbs_connect(struct raw *self, int i, const struct card *peer) {
    struct rail *rail = &rails[i];
    struct address address;
    (void)self;
    if (strcmp(peer->wire, "verbs") != 0 || peer->length != sizeof(address)) fail("the other side is not of verbs");
    memcpy(&address, peer->name, sizeof(address));
    if (address.ethernet != (rail->port.link_layer == IBV_LINK_LAYER_ETHERNET))
        fail("one port is InfiniBand and the other Ethernet");
    rail->remote_key = (uint32_t)peer->key;
    rail->remote_base = peer->base;
    connect_lane(rail, &rail->data, &address, 0);
    connect_lane(rail, &rail->text, &address, 1);
}

static void flush_rail(struct rail *rail) {
    struct ibv_send_wr *last, *bad;
    if (rail->chain == 0) return;
    last = &rail->links[rail->chain - 1];
    last->next = NULL;
    last->send_flags |= IBV_SEND_SIGNALED;
    rail->chained->silent = 0;
    check(ibv_post_send(rail->chained->pair, rail->links, &bad), "ibv_post_send");
    rail->chain = 0;
}

static void verbs_flush(struct raw *self) {
    for (int i = 0; i < self->rail_count; i++) flush_rail(&rails[i]);
}

static int post_receive(struct raw *self, struct rail *rail, struct work *work, uint64_t local, size_t size) {
    struct ibv_sge place = {(uintptr_t)self->arena + local, (uint32_t)size, rail->memory->lkey};
    struct ibv_recv_wr request = {.wr_id = (uintptr_t)work, .sg_list = &place, .num_sge = 1}, *bad;
    int code = ibv_post_recv(rail->text.pair, &request, &bad);
    if (code == ENOMEM) return -EAGAIN;
    check(code, "ibv_post_recv");
    return 0;
}

static int verbs_post(struct raw *self, int i, struct work *work, uint64_t local, uint64_t remote, size_t size,
                      int64_t immediate) {
    struct rail *rail = &rails[i];
    struct lane *lane = work->what == SEND ? &rail->text : &rail->data;
    struct ibv_send_wr *link;
    if (work->what == RECEIVE) return post_receive(self, rail, work, local, size);
    if (lane->head - lane->tail == rail->depth) return -EAGAIN;
    if (rail->chain == CHAIN || (rail->chain && rail->chained != lane)) flush_rail(rail);
    rail->places[rail->chain] = (struct ibv_sge){(uintptr_t)self->arena + local, (uint32_t)size, rail->memory->lkey};
    link = &rail->links[rail->chain];
    link->wr_id = (uintptr_t)work;
    link->next = link + 1;
    link->sg_list = &rail->places[rail->chain];
    link->num_sge = 1;
    link->send_flags = 0;
    link->opcode = work->what == SEND ? IBV_WR_SEND : work->what == READ ? IBV_WR_RDMA_READ
                   : immediate < 0 ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_WRITE_WITH_IMM;
    link->wr.rdma.remote_addr = rail->remote_base + remote;
    link->wr.rdma.rkey = rail->remote_key;
    if (immediate >= 0) {
        link->imm_data = htonl((uint32_t)immediate);
        link->send_flags |= IBV_SEND_SOLICITED;
    }
    if (work->what != READ && size <= lane->inline_bytes) link->send_flags |= IBV_SEND_INLINE;
    if (++lane->silent >= self->stride) {
        link->send_flags |= IBV_SEND_SIGNALED;
        lane->silent = 0;
    }
    rail->chained = lane;
    rail->chain++;
    lane->ring[lane->head++ % DEPTH] = work;
    return 0;
}

/* Everything that was posted before is over, too. */
static void retire(struct raw *self, struct lane *lane, struct work *last) {
    struct work *work;
    do completed(self, work = lane->ring[lane->tail++ % DEPTH]);
    while (work != last);
}

static void take(struct raw *self, struct rail *rail, const struct ibv_wc *done) {
    struct work *work = (struct work *)(uintptr_t)done->wr_id;
    if (done->status != IBV_WC_SUCCESS) fail("a completion failed: %s", verbs.wc_status_str(done->status));
    if (done->opcode == IBV_WC_RECV_RDMA_WITH_IMM) {
        rail->missing++;
        arrived(self, ntohl(done->imm_data));
    } else if (done->opcode & IBV_WC_RECV) {
        completed(self, work);
    } else {
        retire(self, work->what == SEND ? &rail->text : &rail->data, work);
    }
}

static int verbs_poll(struct raw *self) {
    struct ibv_wc done[BATCH];
    int total = 0;
    for (int i = 0; i < self->rail_count; i++) {
        int got = ibv_poll_cq(rails[i].queue, BATCH, done);
        check(got < 0 ? EIO : 0, "ibv_poll_cq");
        for (int j = 0; j < got; j++) take(self, &rails[i], &done[j]);
        refill(&rails[i]);
        total += got;
    }
    return total;
}

static void take_event(struct rail *rail) {
    struct ibv_cq *queue;
    void *context;
    if (verbs.get_cq_event(rail->channel, &queue, &context) != 0) return;
    rail->armed = NOT_ARMED;
    rail->events++;
}

/* Arm and have it polled once more; only then sleep. */
static void verbs_sleep(struct raw *self) {
    struct pollfd set[MAX_RAILS];
    enum armed wanted = self->quiet ? FOR_SOLICITED : FOR_ALL;
    bool late = false;
    for (int i = 0; i < self->rail_count; i++) {
        if (rails[i].armed >= wanted) continue;
        check(ibv_req_notify_cq(rails[i].queue, wanted == FOR_SOLICITED), "ibv_req_notify_cq");
        rails[i].armed = wanted;
        late = true;
    }
    if (late) return;
    for (int i = 0; i < self->rail_count; i++)
        set[i] = (struct pollfd){.fd = rails[i].channel->fd, .events = POLLIN};
    if (self->rail_count > 1) poll(set, (nfds_t)self->rail_count, -1);
    for (int i = 0; i < self->rail_count; i++)
        if (self->rail_count == 1 || set[i].revents) take_event(&rails[i]);
}

static void verbs_close(struct raw *self) {
    for (int i = 0; i < self->rail_count; i++) {
        struct rail *rail = &rails[i];
        verbs.destroy_qp(rail->data.pair);
        verbs.destroy_qp(rail->text.pair);
        verbs.ack_cq_events(rail->queue, rail->events);
        verbs.destroy_cq(rail->queue);
        if (rail->channel != NULL) verbs.destroy_comp_channel(rail->channel);
        verbs.dereg_mr(rail->memory);
        if (rail->parent != rail->domain) verbs.dealloc_pd(rail->parent);
        if (rail->thread != NULL) ibv_dealloc_td(rail->thread);
        verbs.dealloc_pd(rail->domain);
        verbs.close_device(rail->context);
    }
}

const struct kind verbs_kind = {
    .open = verbs_open, .card = verbs_card, .connect = verbs_connect, .post = verbs_post, .flush = verbs_flush,
    .poll = verbs_poll, .sleep = verbs_sleep, .close = verbs_close,
};
