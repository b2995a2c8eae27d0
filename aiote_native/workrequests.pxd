from libc.stdint cimport int64_t, uint8_t, uint64_t

from aiote_native.structs cimport MAX_CHANNELS, MAX_RAILS, Op

cdef class Waitable:
    cdef readonly bint is_over
    cdef public object on_over
    cdef public object waiter
    cdef int resolved(self) except -1

cdef int finish(Waitable item, list woken=*) except -1

cdef class LocalMemory:
    cdef object __weakref__
    cdef void* descs[MAX_RAILS]
    cdef uint8_t ranks[MAX_RAILS]
    cdef bint ranked
    cdef readonly uint64_t address
    cdef readonly uint64_t length
    cdef readonly bint writable
    cdef readonly int access
    cdef readonly object buffer
    cdef readonly tuple registrations
    cdef public uint64_t in_flight
    cdef public object on_idle
    cdef public object owner
    cdef public object events  # the EventPool of its device, where it is GPU memory
    cdef public bint closing
    cdef int leave(self) except -1

cdef class RemoteMemory:
    cdef public object link
    cdef readonly uint64_t lease
    cdef public object lease_flight
    cdef uint64_t bases[MAX_CHANNELS]
    cdef uint64_t keys[MAX_CHANNELS]
    cdef readonly int rails
    cdef readonly uint64_t length
    cdef readonly bint writable
    cdef readonly bint readable

cdef class PageIndex:
    cdef int64_t* values
    cdef readonly uint64_t count
    cdef int64_t least
    cdef int64_t most
    cdef void find_bounds(self) noexcept
    cdef int allocate(self, uint64_t count) except -1
    cdef bint copy_buffer(self, object indices) except -1

cdef int fill(Op* op, LocalMemory local, uint64_t local_offset, RemoteMemory remote, uint64_t remote_offset,
              uint64_t local_extent, uint64_t remote_extent, bint into_local) except -1

cdef class Operation(Waitable):
    cdef Op op
    cdef bint submitted
    cdef LocalMemory local
    cdef RemoteMemory remote
    cdef object kept
    cdef public object order   # the Order that it waits behind, if any
    cdef readonly str broken   # the GPU's error that made it fail
    cdef int take(self, LocalMemory local, uint64_t local_offset, RemoteMemory remote, uint64_t remote_offset,
                  uint64_t local_extent, uint64_t remote_extent, bint into_local) except -1
    cdef int take_pages(self, LocalMemory local, uint64_t local_offset, PageIndex here, uint64_t local_stride,
                        RemoteMemory remote, uint64_t remote_offset, PageIndex there, uint64_t remote_stride,
                        uint64_t page_bytes, bint into_local) except -1
