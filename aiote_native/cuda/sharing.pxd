# Memory of a GPU that another process of this host opens: what its owner gives away, and what the other makes of it.
#
# The driver shares whole allocations: what is given away names the one that the memory lies in, and references to it
# are offsets. It is opened once for each channel and device, in a thread, since that takes a fraction of a millisecond.
from libc.stdint cimport uint8_t, uint32_t, uint64_t

from aiote_native.cuda.copies cimport GpuQueues

cdef extern from "<pthread.h>" nogil:
    ctypedef unsigned long pthread_t

cdef enum:
    HANDLE_BYTES = 64
    TOKEN_BYTES = 16

# What travels, for memory of `cuMemAlloc` a handle of the driver's, for `segments` of memory of `cuMemCreate` the name
# of the socket that gives their descriptors. Inside the process that made it, it is known by its token, which nobody
# can guess: the driver does not open a handle of the process's own.
cdef struct Handle:
    uint64_t size        # of the allocation, or of all segments
    uint64_t segments    # 0: `bytes` are the driver's
    uint8_t[TOKEN_BYTES] token
    uint8_t[HANDLE_BYTES] bytes

cdef struct Segment:
    uint64_t address
    uint64_t size

# An allocation, or several side by side, that memory of ours lies in. `buffer` is its number, which the driver gives to
# no other in the life of the process: an address that was freed and given out again has another.
cdef struct Export:
    Export* next
    Export* next_own
    uint64_t base
    uint64_t buffer
    void* context
    Segment* parts       # as many as the handle has segments
    Handle handle
    int uses             # registrations that lie in it, and have not ended
    int holds            # those that have not let go of it
    int known            # channels whose peers have it, or may have it, open

cdef enum ImportState:
    WAITING = 0
    OPENING = 1
    OPEN = 2
    FAILED = 3
    CLOSING = 4
    CLOSED = 5

# A peer's allocation, opened in the context of a device of ours.
cdef struct Import:
    Import* next
    uint64_t number      # that the peer has given it
    Handle handle
    GpuQueues* gpu
    int device
    uint64_t address
    int socket           # that descriptors of segments come by
    uint64_t* sizes      # of the segments that are mapped
    uint64_t mapped
    int state            # `import_state` reads it: the thread writes it
    int code             # the driver's, where it is FAILED
    bint own             # it is of this process
    bint forgotten       # the peer wants it closed
    uint32_t last        # behind the last copy from it
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
