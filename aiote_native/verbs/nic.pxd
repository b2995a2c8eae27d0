from libc.stdint cimport uint16_t, uint32_t, uint64_t, uint8_t

from aiote_native.provider cimport NativeDevice, NicRegistration
from aiote_native.verbs.ibverbs cimport (
    ibv_context, ibv_device_attr, ibv_gid, ibv_mr, ibv_pd, ibv_port_attr, ibv_recv_wr, ibv_srq, ibv_td)

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
