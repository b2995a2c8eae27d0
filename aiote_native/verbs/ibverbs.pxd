# The part of <infiniband/verbs.h> that aiote uses. The functions that the library exports are called through the table
# in nic.pyx; the functions here are inline and call the operations of an opened context.
from libc.stdint cimport int32_t, uint16_t, uint32_t, uint64_t, uint8_t

cdef extern from "<infiniband/verbs.h>" nogil:
    enum:
        IBV_ACCESS_LOCAL_WRITE
        IBV_ACCESS_REMOTE_WRITE
        IBV_ACCESS_REMOTE_READ
        IBV_ACCESS_RELAXED_ORDERING
        IBV_LINK_LAYER_INFINIBAND
        IBV_LINK_LAYER_ETHERNET
        IBV_PORT_ACTIVE
        IBV_QPT_RC
        IBV_QPS_INIT
        IBV_QPS_RTR
        IBV_QPS_RTS
        IBV_QPS_ERR
        IBV_SEND_SIGNALED
        IBV_SEND_INLINE
        IBV_WC_SUCCESS
        IBV_WC_LOC_LEN_ERR
        IBV_WC_LOC_PROT_ERR
        IBV_WC_WR_FLUSH_ERR
        IBV_WC_REM_INV_REQ_ERR
        IBV_WC_REM_ACCESS_ERR
        IBV_WC_REM_OP_ERR
        IBV_WC_RETRY_EXC_ERR
        IBV_WC_RNR_RETRY_EXC_ERR
        IBV_WC_REM_ABORT_ERR
        IBV_WC_RECV
        IBV_WC_RECV_RDMA_WITH_IMM
        IBV_EVENT_QP_FATAL
        IBV_EVENT_QP_REQ_ERR
        IBV_EVENT_QP_ACCESS_ERR
        IBV_EVENT_COMM_EST
        IBV_EVENT_CQ_ERR
        IBV_EVENT_SRQ_ERR
        IBV_EVENT_PORT_ACTIVE
        IBV_EVENT_PORT_ERR
        IBV_EVENT_DEVICE_FATAL
        IBV_EVENT_GID_CHANGE
        IBV_QP_STATE
        IBV_QP_PKEY_INDEX
        IBV_QP_PORT
        IBV_QP_ACCESS_FLAGS
        IBV_QP_AV
        IBV_QP_PATH_MTU
        IBV_QP_DEST_QPN
        IBV_QP_RQ_PSN
        IBV_QP_MAX_DEST_RD_ATOMIC
        IBV_QP_MIN_RNR_TIMER
        IBV_QP_TIMEOUT
        IBV_QP_RETRY_CNT
        IBV_QP_RNR_RETRY
        IBV_QP_SQ_PSN
        IBV_QP_MAX_QP_RD_ATOMIC

    ctypedef int ibv_wr_opcode
    enum:
        IBV_WR_RDMA_WRITE
        IBV_WR_RDMA_WRITE_WITH_IMM
        IBV_WR_SEND
        IBV_WR_RDMA_READ

    union ibv_gid:
        uint8_t raw[16]

    struct ibv_device:
        pass

    struct ibv_context:
        ibv_device* device
        int async_fd
        int num_comp_vectors

    struct ibv_device_attr:
        int max_qp_wr
        int max_sge
        int max_cqe
        int max_qp_rd_atom
        int max_qp_init_rd_atom
        int max_srq
        int max_srq_wr
        uint8_t phys_port_cnt
        uint64_t max_mr_size
        int device_cap_flags

    struct ibv_port_attr:
        int state
        int max_mtu
        int active_mtu
        int gid_tbl_len
        uint32_t max_msg_sz
        uint16_t pkey_tbl_len
        uint16_t lid
        uint8_t link_layer

    struct ibv_pd:
        pass

    struct ibv_td:
        pass

    struct ibv_mr:
        uint32_t lkey
        uint32_t rkey

    struct ibv_comp_channel:
        int fd

    struct ibv_cq:
        int cqe

    struct ibv_srq:
        pass

    struct ibv_qp:
        uint32_t qp_num

    struct ibv_srq_attr:
        uint32_t max_wr
        uint32_t max_sge
        uint32_t srq_limit

    struct ibv_srq_init_attr:
        void* srq_context
        ibv_srq_attr attr

    struct ibv_qp_cap:
        uint32_t max_send_wr
        uint32_t max_recv_wr
        uint32_t max_send_sge
        uint32_t max_recv_sge
        uint32_t max_inline_data

    struct ibv_qp_init_attr:
        void* qp_context
        ibv_cq* send_cq
        ibv_cq* recv_cq
        ibv_srq* srq
        ibv_qp_cap cap
        int qp_type
        int sq_sig_all

    struct ibv_global_route:
        ibv_gid dgid
        uint32_t flow_label
        uint8_t sgid_index
        uint8_t hop_limit
        uint8_t traffic_class

    struct ibv_ah_attr:
        ibv_global_route grh
        uint16_t dlid
        uint8_t sl
        uint8_t is_global
        uint8_t port_num

    struct ibv_qp_attr:
        int qp_state
        int path_mtu
        uint32_t rq_psn
        uint32_t sq_psn
        uint32_t dest_qp_num
        unsigned int qp_access_flags
        ibv_ah_attr ah_attr
        uint16_t pkey_index
        uint8_t max_rd_atomic
        uint8_t max_dest_rd_atomic
        uint8_t min_rnr_timer
        uint8_t port_num
        uint8_t timeout
        uint8_t retry_cnt
        uint8_t rnr_retry

    struct ibv_sge:
        uint64_t addr
        uint32_t length
        uint32_t lkey

    struct rdma_part:
        uint64_t remote_addr
        uint32_t rkey

    union wr_part:
        rdma_part rdma

    struct ibv_send_wr:
        uint64_t wr_id
        ibv_send_wr* next
        ibv_sge* sg_list
        int num_sge
        int opcode
        unsigned int send_flags
        uint32_t imm_data
        wr_part wr

    struct ibv_recv_wr:
        uint64_t wr_id
        ibv_recv_wr* next
        ibv_sge* sg_list
        int num_sge

    struct ibv_wc:
        uint64_t wr_id
        int status
        int opcode
        uint32_t vendor_err
        uint32_t byte_len
        uint32_t imm_data
        unsigned int wc_flags

    union event_element:
        ibv_cq* cq
        ibv_qp* qp
        ibv_srq* srq
        int port_num

    struct ibv_async_event:
        event_element element
        int event_type

    int ibv_post_send(ibv_qp* qp, ibv_send_wr* wr, ibv_send_wr** bad)
    int ibv_post_recv(ibv_qp* qp, ibv_recv_wr* wr, ibv_recv_wr** bad)
    int ibv_post_srq_recv(ibv_srq* srq, ibv_recv_wr* wr, ibv_recv_wr** bad)
    int ibv_poll_cq(ibv_cq* cq, int entries, ibv_wc* wc)
    int ibv_req_notify_cq(ibv_cq* cq, int solicited_only)

cdef extern from "<arpa/inet.h>" nogil:
    uint32_t htonl(uint32_t)
    uint32_t ntohl(uint32_t)

cdef extern from * nogil:
    """
    #include <errno.h>
    #include <infiniband/verbs.h>

    typedef int (*query_port_old)(struct ibv_context*, uint8_t, void*);

    /* Call an operation of a context, found by name as verbs.h does; NULL or EOPNOTSUPP where the driver lacks it. */
    static inline int aiote_query_port(struct ibv_context* context, uint8_t port, struct ibv_port_attr* out,
                                query_port_old old) {
        struct verbs_context* known = verbs_get_ctx_op(context, query_port);
        memset(out, 0, sizeof(*out));
        return known ? known->query_port(context, port, out, sizeof(*out)) : old(context, port, out);
    }
    static inline struct ibv_td* aiote_alloc_td(struct ibv_context* context) {
        struct ibv_td_init_attr attr = {0};
        struct verbs_context* known = verbs_get_ctx_op(context, alloc_td);
        return known ? known->alloc_td(context, &attr) : NULL;
    }
    static inline int aiote_dealloc_td(struct ibv_context* context, struct ibv_td* td) {
        struct verbs_context* known = verbs_get_ctx_op(context, dealloc_td);
        return known ? known->dealloc_td(td) : EOPNOTSUPP;
    }
    static inline struct ibv_pd* aiote_alloc_parent(struct ibv_context* context, struct ibv_pd* pd, struct ibv_td* td) {
        struct ibv_parent_domain_init_attr attr = {.pd = pd, .td = td};
        struct verbs_context* known = verbs_get_ctx_op(context, alloc_parent_domain);
        return known ? known->alloc_parent_domain(context, &attr) : NULL;
    }
    """
    ctypedef int (*query_port_old)(ibv_context*, uint8_t, void*) noexcept nogil
    int aiote_query_port(ibv_context* context, uint8_t port, ibv_port_attr* out, query_port_old old)
    ibv_td* aiote_alloc_td(ibv_context* context)
    int aiote_dealloc_td(ibv_context* context, ibv_td* td)
    ibv_pd* aiote_alloc_parent(ibv_context* context, ibv_pd* pd, ibv_td* td)
