/* A libibverbs that leaves the last byte of each large write out, to be preloaded: what a damaged NIC may do. aiote takes
   the library's functions by dlvsym, so that is what this replaces. */
#include <dlfcn.h>
#include <infiniband/verbs.h>
#include <string.h>

enum { LARGE = 4096 };

static int (*post)(struct ibv_qp*, struct ibv_send_wr*, struct ibv_send_wr**);
static struct ibv_qp* (*create)(struct ibv_pd*, struct ibv_qp_init_attr*);

static int damaged_post(struct ibv_qp* qp, struct ibv_send_wr* first, struct ibv_send_wr** bad) {
    for (struct ibv_send_wr* wr = first; wr; wr = wr->next) {
        int writes = wr->opcode == IBV_WR_RDMA_WRITE || wr->opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
        if (writes && wr->num_sge && wr->sg_list[0].length >= LARGE) wr->sg_list[0].length--;
    }
    return post(qp, first, bad);
}

static struct ibv_qp* damaged_create(struct ibv_pd* pd, struct ibv_qp_init_attr* attr) {
    struct ibv_qp* qp = create(pd, attr);
    if (qp && qp->context->ops.post_send != damaged_post) {
        post = qp->context->ops.post_send;
        qp->context->ops.post_send = damaged_post;
    }
    return qp;
}

void* dlvsym(void* handle, const char* name, const char* version) {
    void* (*real)(void*, const char*, const char*) = dlsym(RTLD_NEXT, "dlvsym");
    void* found = real(handle, name, version);
    if (!found || strcmp(name, "ibv_create_qp")) return found;
    create = found;
    return damaged_create;
}
