from libc.stdint cimport int64_t, uint64_t

from aiote_native.clocks cimport Clock
from aiote_native.sim.net cimport Net

cdef class World(Clock):
    cdef Net* net
    cdef public int children
    cdef readonly bint closed
    cdef uint64_t epoch
    cpdef int usable(self) except -1
    cdef void free_net(self)
