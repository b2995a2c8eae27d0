from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from aiote_native.cuda.descriptors cimport AioteBatch
from aiote_native.cuda.driver cimport GpuQueues
from aiote_native.system.buffers cimport DLDataType, DLManagedTensor, DLManagedTensorVersioned

# A tensor lent through DLPack, in the old or the versioned form, and the object that it keeps alive.
cdef struct Lent:
    PyObject* owner
    DLManagedTensor old
    DLManagedTensorVersioned versioned
    int64_t length

cdef class Owned:
    cdef readonly int ordinal
    cdef readonly uint64_t address   # on the device
    cdef readonly uint64_t nbytes
    cdef void* context
    cdef uint64_t epoch
    cdef bint retained
    cdef Lent* lent(self, DLDataType kind, int64_t count) except NULL
    cdef void release(self) noexcept
    cdef void free_memory(self) noexcept

cdef class PinnedValue(Owned):
    cdef void* pages
    cdef int exports

cdef class DeviceMemory(Owned):
    pass

# Memory of a GPU that another process of this host opens: the owner's exports, and the other process's imports.
#
# The driver shares whole allocations. An export therefore names the allocation that the memory lies in, and references
# to the memory are offsets into it. An allocation is opened once for each channel and device, in a thread, because that
# takes a fraction of a millisecond.

cdef extern from "<pthread.h>" nogil:
    ctypedef unsigned long pthread_t

cdef enum:
    HANDLE_BYTES = 64
    TOKEN_BYTES = 16

# The description of an export that its owner sends to a peer. `bytes` are the driver's handle for memory of
# `cuMemAlloc`; for memory of `cuMemCreate` they name the socket that gives the descriptors of its segments. Engines of
# the owner's process find the export by its random token, because the driver opens no handle in the process that made
# it.
cdef struct Handle:
    uint64_t size        # of the allocation, or of all segments
    uint64_t segments    # 0: `bytes` are the driver's handle
    uint8_t[TOKEN_BYTES] token
    uint8_t[HANDLE_BYTES] bytes

cdef struct Segment:
    uint64_t address
    uint64_t size

# An allocation, or several side by side, that registered memory lies in. `buffer` is the driver's number of it, which
# is unique in the life of the process: an address that was freed and allocated again has another number.
cdef struct Export:
    Export* next
    Export* next_own
    uint64_t base
    uint64_t buffer
    void* context
    Segment* parts       # as many as the handle has segments
    Handle handle
    int uses             # registrations in it whose keys are valid
    int holds            # registrations in it that are not closed; closing comes after the end of the key
    int known            # channels whose peers have it open or may have, and the thread that gives its descriptors

cdef enum ImportState:
    WAITING = 0
    OPENING = 1
    OPEN = 2
    FAILED = 3
    CLOSING = 4
    CLOSED = 5

# A peer's allocation, opened in the context of a local device.
cdef struct Import:
    Import* next
    uint64_t number      # the peer's number of it
    Handle handle
    GpuQueues* gpu
    int device
    uint64_t address
    int socket           # receives the descriptors of segments
    uint64_t* sizes      # the sizes of the mapped segments
    uint64_t mapped
    int state            # written by the thread; read it with `import_state`
    int code             # the driver's code or -errno, if the state is FAILED
    bint own             # this process exported it
    bint forgotten       # the peer wants it closed
    uint32_t last        # the number behind the last copy from it
    bint threaded
    pthread_t thread

cdef str find_functions()
cdef int address_range(uint64_t* base, size_t* size, uint64_t address) noexcept nogil
cdef int export_memory(void* context, uint64_t address, size_t length, Export* made) except -1
cdef void publish(Export* made) noexcept nogil
cdef void withdraw(Export* made) noexcept nogil
cdef void import_open(Import* self) noexcept nogil
cdef void import_close(Import* self) noexcept nogil
cdef int import_state(Import* self) noexcept nogil
cdef bint import_lives(Import* self) noexcept nogil
cdef void import_end(Import* self) noexcept nogil

cdef enum:
    MOST_SEGMENTS = 65536

cdef bint find_segment_functions()
cdef int list_segments(uint64_t address, size_t length, Export* made) except -1
cdef void export_batch(const Export* made, uint64_t first, AioteBatch* batch, int* descriptors) noexcept nogil
cdef int map_segments(Import* self) noexcept nogil
cdef void unmap_segments(Import* self) noexcept nogil
