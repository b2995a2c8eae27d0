# Copies between a GPU and pinned slots: one queue in each direction, of one device's memory and one rail.
#
# A queue has a stream of its own, which waits for no other, so its copies end in the order in which they were posted.
# The GPU writes their number behind them to a word of pinned memory: to see the end of a copy is a load, and takes no
# lock of the driver's. After an error of the context nothing is written any more, which `queue_look` finds out.
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

cdef enum:
    SLOT_BYTES = 256 * 1024
    SLOTS = 32

cdef struct CopyQueue:
    void* context
    void* stream
    uint32_t* word
    uint64_t word_address  # of it, as the GPU has it
    uint8_t* slots
    uint16_t[SLOTS] free
    int free_count
    # slots that the GPU still reads, in the order of their numbers
    uint16_t[SLOTS] busy
    uint32_t[SLOTS] busy_until
    int busy_first
    int busy_count
    uint32_t posted        # the number behind the last copy
    int error              # the driver's code for which nothing moves any more
    int mode

cdef struct GpuQueues:
    CopyQueue out
    CopyQueue back

cdef class Gpu:
    cdef GpuQueues* queues
    cdef int device
    cdef bint primary
    cdef uint64_t epoch
    cdef int open_queue(self, CopyQueue* queue, void* context) except -1
    cdef void close_queue(self, CopyQueue* queue) noexcept

cdef int queue_take(CopyQueue* self) noexcept nogil
cdef void queue_give(CopyQueue* self, int slot) noexcept nogil
cdef void queue_give_behind(CopyQueue* self, int slot) noexcept nogil
cdef uint8_t* slot_at(const CopyQueue* self, int slot) noexcept nogil
cdef int queue_begin(CopyQueue* self) noexcept nogil
cdef int queue_copy(CopyQueue* self, void* to, const void* source, size_t length) noexcept nogil
cdef uint32_t queue_end(CopyQueue* self) noexcept nogil
cdef uint32_t queue_seen(const CopyQueue* self) noexcept nogil
cdef int queue_state(const CopyQueue* self, uint32_t number) noexcept nogil
cdef void queue_look(CopyQueue* self) noexcept nogil
cdef void queue_wait(CopyQueue* self, uint32_t number) noexcept nogil
