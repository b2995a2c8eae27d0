from libc.stdint cimport uint32_t

from aiote_native.structs cimport Op

cdef class TargetOps:
    cdef Op* ops
    cdef readonly uint32_t count

cdef class ScatterTargets(TargetOps):
    cdef uint32_t capacity
    cdef list links
    cdef list memories
    cdef int retain(self) except -1
