from libc.stdint cimport int64_t, uint64_t

from aiote_native.engine.provider cimport NativeDevice, NativeEndpoint, NicRegistration
from aiote_native.engine.structs cimport RailOps
from aiote_native.sim.traffic cimport Memory, Net, Nic, SimPort
from aiote_native.system.base cimport Clock

cdef class World(Clock):
    cdef Net* net
    cdef public int children
    cdef readonly bint closed
    cdef uint64_t epoch
    cpdef int usable(self) except -1
    cdef void free_net(self)

cdef class SimDevice(NativeDevice):
    cdef readonly World world
    cdef Nic* nic
    cdef bint offsets
    cdef bint opened

cdef class SimMemory(NicRegistration):
    cdef SimDevice device
    cdef Memory* memory
    cdef void drop(self) noexcept

cdef RailOps operations

cdef class SimEndpoint(NativeEndpoint):
    cdef SimDevice device
    cdef SimPort* impl
    cdef SimPort* channel_impl
    cdef int open(self) except -1

cdef class NullEndpoint(SimEndpoint):
    pass
