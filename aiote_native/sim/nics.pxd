from aiote_native.provider cimport NativeDevice, NicRegistration
from aiote_native.sim.net cimport Memory, Nic
from aiote_native.sim.world cimport World

cdef class SimDevice(NativeDevice):
    cdef readonly World world
    cdef Nic* nic
    cdef bint offsets
    cdef bint opened

cdef class SimMemory(NicRegistration):
    cdef SimDevice device
    cdef Memory* memory
    cdef void drop(self) noexcept
