from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

from aiote_native.engine.provider cimport NativeDevice, NicRegistration
from aiote_native.verbs.ibverbs cimport (
    ibv_async_event, ibv_comp_channel, ibv_context, ibv_cq, ibv_device, ibv_device_attr, ibv_gid, ibv_mr, ibv_pd,
    ibv_port_attr, ibv_qp, ibv_qp_attr, ibv_qp_init_attr, ibv_recv_wr, ibv_srq, ibv_srq_init_attr, ibv_td,
    query_port_old)

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

cdef enum:
    REFILL = 64       # receives posted at a time
    FLUSHED_DEVICES = 64
    NOT_INLINE = 1    # bit above the local key in a descriptor: the CPU cannot read the memory, so never send it inline

ctypedef ibv_recv_wr refill_chain[REFILL]

# How queue pairs are made and connected, in the units of the verbs API.
cdef struct Settings:
    int gid_index
    int pkey_index
    int service_level
    int traffic_class
    int mtu              # bytes; 0: the MTU that the port is set to
    int timeout          # an unanswered packet is sent again after 4.096 us * 2 ** timeout
    int retries          # number of such retries before the queue pair fails
    int srq_depth        # receives in the queue that all peers share
    int messages         # receives for the messages of each peer

# For each GPU, by ordinal: how many registrations ask that arriving writes be flushed to it before they are counted.
cdef struct Flushes:
    int uses[FLUSHED_DEVICES]
    int all_uses
    void* contexts[FLUSHED_DEVICES]
    bint primary[FLUSHED_DEVICES]

# One port of a device, and the objects that its queue pairs share. `missing` receives of the shared queue are to be
# posted again.
cdef struct Nic:
    ibv_context* context
    ibv_pd* pd
    ibv_td* td
    ibv_pd* parent       # a parent domain whose queue pairs take no locks of their own, or `pd`
    ibv_srq* srq
    uint32_t receives
    uint32_t missing
    uint32_t refill
    uint64_t refills
    refill_chain chain
    ibv_device_attr attr
    ibv_port_attr port
    ibv_gid gid
    uint8_t number
    Settings settings
    Flushes flushes

cdef int refill(Nic* nic) noexcept nogil

cdef class VerbsDevice(NativeDevice):
    cdef Nic nic
    cdef readonly str name
    cdef int open(self) except -1
    cdef int drop(self) noexcept
    cdef int open_context(self) except -1
    cdef int open_receives(self) except -1
    cdef ibv_context* opened(self) except NULL

cdef class VerbsMemory(NicRegistration):
    cdef VerbsDevice device
    cdef ibv_mr* mr
    cdef int flushed         # the GPU's ordinal; -1: none
    cdef void unflush(self) noexcept
    cdef int pin(self, ibv_pd* pd, uint64_t address, size_t length, int flags, int fd, uint64_t offset) noexcept
