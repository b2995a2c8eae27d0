from libc.stdint cimport uint64_t

from aiote_native.streams.stream cimport Stream, iovec

cdef int list_slot(Stream* self, iovec* vectors) noexcept nogil
cdef void land(Stream* self, uint64_t bytes) noexcept nogil
cdef void drop_slot(Stream* self) noexcept nogil
