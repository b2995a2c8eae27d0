from libc.stdint cimport uint64_t

from aiote_native.structs cimport Batch, Channel, Completion, Post, WorkRequest

cdef int gate_post(Channel* channel, const Post* args, WorkRequest* wr) noexcept nogil
cdef void gate_leave(Channel* channel) noexcept nogil
cdef void batch_end(Batch* batch) noexcept nogil
cdef void batch_flush(Batch* batch) noexcept nogil
cdef void batch_drop(Batch* batch, Channel* channel) noexcept nogil
cdef int gate_poll(Channel* channel, Completion* out, int capacity) noexcept nogil
cdef bint gate_paced(Channel* channel, uint64_t payload, uint64_t window) noexcept nogil
cdef int channel_arm(Channel* channel) noexcept nogil
cdef bint is_reached(Channel* channel) noexcept nogil
cdef void gate_shut(Channel* channel) noexcept nogil
cdef bint gate_wait(Channel* channel) noexcept nogil
