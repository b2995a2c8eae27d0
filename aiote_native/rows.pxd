from libc.stdint cimport uint32_t

from aiote_native.waits cimport CounterHandle, CounterWait

cdef class CountRow:
    cdef list handles
    cdef list waits
    cdef readonly int reached
    cdef int look(self) except -1
