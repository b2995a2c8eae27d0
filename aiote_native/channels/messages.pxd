from libc.stdint cimport uint8_t, uint32_t, uint64_t

from aiote_native.engine.structs cimport Channel, Completion, Mailbox, Op, PeerState, Slot, State

cdef enum:
    HEADER_BYTES = 32
    CREDIT_SLOTS = 4

cdef Mailbox* mailbox_new(Channel* channel, uint32_t slots, uint32_t slot_bytes, uint32_t peer_slots, uint8_t* memory,
                          void* desc) except NULL
cdef void mailbox_free(Mailbox* self) noexcept nogil
cdef size_t mailbox_bytes(uint32_t slots, uint32_t peer_slots, uint32_t slot_bytes) noexcept nogil
cdef void mailbox_open(State* state, Mailbox* self) noexcept nogil
cdef bint mailbox_is_due(const Mailbox* self) noexcept nogil
cdef void mailbox_pump(State* state, Mailbox* self) noexcept nogil
cdef void mailbox_received(State* state, Mailbox* self, Slot* slot, const Completion* completion) noexcept nogil
cdef void mailbox_sent(State* state, Mailbox* self, Slot* slot, const Completion* completion) noexcept nogil
cdef void mailbox_start(State* state, PeerState* peer, Op* op) noexcept nogil
cdef Slot* mailbox_peek(Mailbox* self) noexcept nogil
cdef void mailbox_consume(State* state, Mailbox* self) noexcept nogil
cdef void mailbox_cancel(State* state, Mailbox* self, Op* op) noexcept nogil
cdef void mailbox_fail(State* state, Mailbox* self, int status, int rail) noexcept nogil
cdef void post_receives(State* state, Mailbox* self) noexcept nogil

cdef void mailbox_detach(Mailbox* self) noexcept nogil
cdef bint mailbox_resolve(State* state, Mailbox* self, uint64_t top, const uint64_t* holes,
                          uint64_t count) noexcept nogil
cdef void mailbox_attach(State* state, Mailbox* self, Channel* channel, void* desc) noexcept nogil
cdef void mailbox_release(State* state, Mailbox* self) noexcept nogil
cdef uint64_t mailbox_arrivals(const Mailbox* self, uint64_t* seen) noexcept nogil
cdef list mailbox_holes(uint64_t top, const uint64_t* seen, uint64_t slots)
