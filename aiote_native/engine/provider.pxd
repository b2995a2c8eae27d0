from libc.stdint cimport uint64_t

from aiote_native.engine.structs cimport RailOps

cdef class NativeDevice:
    cdef public int children
    cdef public bint pins
    cdef public bint stages
    cdef public bint shares
    cdef uint64_t epoch

cdef class NicRegistration:
    cdef void* desc
    cdef readonly uint64_t key
    cdef readonly uint64_t base
    cdef readonly size_t length
    cdef readonly int ordinal
    cdef readonly str unshared

cdef class NativeEndpoint:
    cdef const RailOps* ops
    cdef readonly int wait_fd
    cdef readonly int memory_fd
    cdef readonly bytes address
    cdef readonly uint64_t largest
    cdef readonly uint64_t depth
    cdef readonly uint64_t window
    cdef readonly int max_sge
    cdef readonly uint64_t gathers_from
    cdef readonly bint forgets
    cdef void** impl_slot(self) noexcept
    cdef NativeDevice device_of(self)
    cdef void* release_to_channel(self) except NULL
    cdef void channel_closed(self)
    cdef void drop(self, NativeDevice home) noexcept
