from aiote_native.kinds cimport NativeDevice, Registration
from aiote_native.streams.stream cimport Memory, Registry

cdef class StreamDevice(NativeDevice):
    cdef Registry* registry

cdef class StreamMemory(Registration):
    cdef StreamDevice device
    cdef Memory* memory
