from aiote_native.kinds cimport NativeEndpoint
from aiote_native.sim.nics cimport SimDevice
from aiote_native.sim.net cimport SimEndpoint

cdef class Endpoint(NativeEndpoint):
    cdef SimDevice device
    cdef SimEndpoint* impl
    cdef SimEndpoint* lent
    cdef int open(self) except -1
