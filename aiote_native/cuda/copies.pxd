# Copies between a GPU and pinned slots. Each pair of a device and a rail has one queue in each direction.
#
# A queue has a stream of its own, which waits for no other, so its copies end in the order in which they were posted.
# Behind each group of copies, the GPU writes the group's number to a word of pinned memory. Checking for the end of a
# copy therefore takes one load and no lock of the driver. After an error of the context, the GPU writes no more
# numbers; `queue_look` detects that.
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

cdef enum:
    SLOT_BYTES = 256 * 1024
    SLOTS = 32

cdef struct CopyQueue:
    void* context
    void* stream
    uint32_t* word
    uint64_t word_address  # the word's address on the GPU
    uint8_t* slots
    uint16_t[SLOTS] free
    int free_count
    # slots that the GPU may still read, in the order of the numbers behind their copies
    uint16_t[SLOTS] busy
    uint32_t[SLOTS] busy_until
    int busy_first
    int busy_count
    uint32_t posted        # the number behind the last copy
    int error              # the driver's code if the device is broken: no copy proceeds any more
    int mode

cdef struct GpuQueues:
    CopyQueue out
    CopyQueue back

cdef class CopyQueues:
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
