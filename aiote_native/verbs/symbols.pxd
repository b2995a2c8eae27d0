from libc.stdint cimport uint16_t, uint32_t, uint64_t, uint8_t

from aiote_native.verbs.ibverbs cimport (
    ibv_async_event, ibv_comp_channel, ibv_context, ibv_cq, ibv_device, ibv_device_attr, ibv_gid, ibv_mr, ibv_pd,
    ibv_qp, ibv_qp_attr, ibv_qp_init_attr, ibv_srq, ibv_srq_init_attr, query_port_old)

# The functions that libibverbs exports. The last two are NULL if the library is too old to have them.
cdef struct Symbols:
    ibv_device** (*get_device_list)(int* count) noexcept nogil
    void (*free_device_list)(ibv_device** list) noexcept nogil
    const char* (*get_device_name)(ibv_device* device) noexcept nogil
    ibv_context* (*open_device)(ibv_device* device) noexcept nogil
    int (*close_device)(ibv_context* context) noexcept nogil
    int (*query_device)(ibv_context* context, ibv_device_attr* attr) noexcept nogil
    query_port_old query_port
    int (*query_gid)(ibv_context* context, uint8_t port, int index, ibv_gid* gid) noexcept nogil
    ibv_pd* (*alloc_pd)(ibv_context* context) noexcept nogil
    int (*dealloc_pd)(ibv_pd* pd) noexcept nogil
    ibv_mr* (*reg_mr)(ibv_pd* pd, void* address, size_t length, int access) noexcept nogil
    int (*dereg_mr)(ibv_mr* mr) noexcept nogil
    ibv_comp_channel* (*create_comp_channel)(ibv_context* context) noexcept nogil
    int (*destroy_comp_channel)(ibv_comp_channel* channel) noexcept nogil
    ibv_cq* (*create_cq)(ibv_context* context, int cqe, void* cq_context, ibv_comp_channel* channel,
                         int vector) noexcept nogil
    int (*destroy_cq)(ibv_cq* cq) noexcept nogil
    int (*get_cq_event)(ibv_comp_channel* channel, ibv_cq** cq, void** cq_context) noexcept nogil
    void (*ack_cq_events)(ibv_cq* cq, unsigned int count) noexcept nogil
    ibv_srq* (*create_srq)(ibv_pd* pd, ibv_srq_init_attr* attr) noexcept nogil
    int (*destroy_srq)(ibv_srq* srq) noexcept nogil
    ibv_qp* (*create_qp)(ibv_pd* pd, ibv_qp_init_attr* attr) noexcept nogil
    int (*modify_qp)(ibv_qp* qp, ibv_qp_attr* attr, int mask) noexcept nogil
    int (*destroy_qp)(ibv_qp* qp) noexcept nogil
    int (*get_async_event)(ibv_context* context, ibv_async_event* event) noexcept nogil
    void (*ack_async_event)(ibv_async_event* event) noexcept nogil
    const char* (*event_type_str)(int event) noexcept nogil
    const char* (*wc_status_str)(int status) noexcept nogil
    ibv_mr* (*reg_mr_iova2)(ibv_pd* pd, void* address, size_t length, uint64_t iova, unsigned int access) noexcept nogil
    ibv_mr* (*reg_dmabuf_mr)(ibv_pd* pd, uint64_t offset, size_t length, uint64_t iova, int fd,
                             int access) noexcept nogil

cdef Symbols verbs  # only for code that runs while something is open, because the library is loaded then
cdef Symbols* symbols() except NULL
cdef int failed(str operation, int code=*) except -1
