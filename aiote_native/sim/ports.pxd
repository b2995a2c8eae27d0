from aiote_native.provider cimport NativeEndpoint
from aiote_native.sim.net cimport SimEndpoint
from aiote_native.sim.nics cimport SimDevice
from aiote_native.structs cimport RailOps

cdef RailOps operations

cdef class Endpoint(NativeEndpoint):
    cdef SimDevice device
    cdef SimEndpoint* impl
    cdef SimEndpoint* lent
    cdef int open(self) except -1
