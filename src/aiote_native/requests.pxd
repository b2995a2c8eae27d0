from libc.stdint cimport int64_t, uint64_t

from aiote_native.peers cimport PeerLink
from aiote_native.workrequests cimport LocalMemory, Operation, RemoteMemory

cdef class LocalSlice:
    cdef readonly LocalMemory memory
    cdef readonly uint64_t start
    cdef readonly uint64_t nbytes

cdef class RemoteSlice:
    cdef readonly RemoteMemory memory
    cdef readonly uint64_t start
    cdef readonly uint64_t nbytes

cdef class Request(Operation):
    cdef public object peer
    cdef public bint refused
    cdef readonly object targets
    cdef PeerLink link
    cdef void leave(self)

cdef int leave_link(PeerLink link) except -1

cdef class Awaiting:
    cdef Request request
    cdef object inner
    cdef bint interrupted
    cdef object interrupt(self, error)
