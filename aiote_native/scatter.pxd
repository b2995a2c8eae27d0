from libc.stdint cimport uint32_t

from aiote_native.structs cimport Op

cdef class ScatterTargets:
    cdef Op* ops
    cdef readonly uint32_t count
    cdef uint32_t capacity
    cdef list links
    cdef list memories
    cdef int retain(self) except -1
