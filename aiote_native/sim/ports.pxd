from aiote_native.provider cimport NativeEndpoint
from aiote_native.sim.net cimport SimPort
from aiote_native.sim.nics cimport SimDevice
from aiote_native.structs cimport RailOps

cdef RailOps operations

cdef class SimEndpoint(NativeEndpoint):
    cdef SimDevice device
    cdef SimPort* impl
    cdef SimPort* channel_impl
    cdef int open(self) except -1
