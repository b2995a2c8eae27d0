from libc.stdint cimport uint64_t

cdef class Flight:
    cdef dict pending
    cdef public object changed
    cdef public bint shut
    cdef readonly uint64_t landed
    cdef readonly uint64_t landed_bytes
    cdef int leave(self, object request, bint failed, uint64_t nbytes) except -1
    cdef int notify(self, object request) except -1
