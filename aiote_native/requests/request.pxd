from libc.stdint cimport int64_t, uint32_t, uint64_t

from aiote_native.channels.peers cimport PeerLink
from aiote_native.engine.core cimport Core
from aiote_native.engine.structs cimport Op
from aiote_native.requests.operations cimport Flight, LocalMemory, Operation, PageIndex, RemoteMemory

cdef class LocalSlice:
    cdef readonly LocalMemory memory
    cdef readonly uint64_t start
    cdef readonly uint64_t nbytes

cdef class RemoteSlice:
    cdef readonly RemoteMemory memory
    cdef readonly uint64_t start
    cdef readonly uint64_t nbytes

cdef class PageSet:
    cdef readonly object region
    cdef readonly PageIndex index
    cdef readonly uint64_t page_bytes
    cdef readonly uint64_t stride
    cdef readonly uint64_t offset
    cdef int assign(self, region, PageIndex index, uint64_t page_bytes, uint64_t stride, uint64_t offset) except -1

cdef class Request(Operation):
    cdef public object peer
    cdef public uint64_t lease
    cdef public bint refused
    cdef readonly object targets
    cdef PeerLink link
    cdef Flight lease_flight
    cdef Flight flight
    cdef void leave(self)
    cdef int land(self) except -1

cdef int leave_link(PeerLink link) except -1

cdef Request make_request(type kind, object peer)

cdef class Awaiting:
    cdef Request request
    cdef object inner
    cdef bint interrupted
    cdef object interrupt(self, error)

cdef class RequestStarter:
    cdef Core core
    cdef type kind
    cdef Request make_between(self, LocalSlice here, RemoteSlice there, PeerLink link, bint reads, stream)
    cdef Request start_slices(self, local, remote, bint reads, imm, stream)
    cdef Request start_pages(self, pages, onto, bint reads, imm, stream)
    cdef Request start_message(self, PeerLink link, bytes payload)
    cdef Request record_start(self, Request request, PeerLink link, RemoteMemory memory)

cdef class TargetOps:
    cdef Op* ops
    cdef readonly uint32_t count

cdef class ScatterTargets(TargetOps):
    cdef uint32_t capacity
    cdef list links
    cdef list memories
    cdef int retain(self) except -1
