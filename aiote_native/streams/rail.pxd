from libc.stdint cimport uint32_t, uint64_t

from aiote_native.cuda.driver cimport CopyQueues
from aiote_native.cuda.memory cimport Export
from aiote_native.engine.provider cimport NativeDevice, NativeEndpoint, NicRegistration
from aiote_native.engine.structs cimport Completion, RailOps
from aiote_native.streams.stream cimport Giver, Memory, Registry, Stream, Wire

cdef int stream_poll(void* impl, Completion* out, int capacity) noexcept nogil

cdef class StreamDevice(NativeDevice):
    cdef Registry* registry
    cdef dict gpus
    cdef uint64_t staging_bytes
    cdef int notify_fd
    cdef Giver* giver
    cdef uint64_t reported_refusals  # refusals that `events` has reported
    cdef int give(self, Export* made) except -1
    cdef void stop_threads(self) noexcept
    cdef void close_descriptor(self) noexcept

cdef class StreamMemory(NicRegistration):
    cdef StreamDevice device
    cdef Memory* memory
    cdef CopyQueues gpu
    cdef uint32_t last_out   # the numbers behind the last copies that were posted before the key ended
    cdef uint32_t last_back
    cdef int export(self) except -1
    cdef bint is_shared(self) noexcept
    cdef void unlist(self) noexcept
    cdef void drop(self) noexcept

cdef class StreamEndpoint(NativeEndpoint):
    cdef StreamDevice device
    cdef int usable(self, StreamDevice device) except -1
    cdef void begin(self, StreamDevice device, Stream* stream, const Wire* wire, const RailOps* ops)

cdef void share_operations(RailOps* operations)
