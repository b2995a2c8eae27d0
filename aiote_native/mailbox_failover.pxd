from libc.stdint cimport uint64_t

from aiote_native.posting cimport State
from aiote_native.structs cimport Channel, Mailbox

cdef void mailbox_detach(Mailbox* self) noexcept nogil
cdef bint mailbox_resolve(State* state, Mailbox* self, uint64_t top, const uint64_t* holes,
                          uint64_t count) noexcept nogil
cdef void mailbox_attach(State* state, Mailbox* self, Channel* channel, void* desc) noexcept nogil
cdef void mailbox_release(State* state, Mailbox* self) noexcept nogil
cdef uint64_t mailbox_arrivals(const Mailbox* self, uint64_t* seen) noexcept nogil
cdef list mailbox_holes(uint64_t top, const uint64_t* seen, uint64_t slots)
