from libc.stdint cimport uint32_t

from aiote_native.cuda.copies cimport Gpu
from aiote_native.provider cimport NativeDevice, NativeEndpoint, Registration
from aiote_native.streams.stream cimport Memory, Registry, Stream, Wire
from aiote_native.structs cimport RailOps

cdef class StreamDevice(NativeDevice):
    cdef Registry* registry
    cdef dict gpus

cdef class StreamMemory(Registration):
    cdef StreamDevice device
    cdef Memory* memory
    cdef Gpu gpu
    cdef uint32_t last_out   # numbers of the copies before the end of the key
    cdef uint32_t last_back
    cdef void unlist(self) noexcept
    cdef void drop(self) noexcept

cdef class StreamEndpoint(NativeEndpoint):
    cdef StreamDevice device
    cdef int usable(self, StreamDevice device) except -1
    cdef void begin(self, StreamDevice device, Stream* stream, const Wire* wire, const RailOps* ops)

cdef void share_operations(RailOps* operations)
