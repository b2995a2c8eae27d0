from libc.stdint cimport uint32_t, uint64_t

from aiote_native.structs cimport Channel, Op, PeerState

cdef enum:
    STREAK_BYTES = 1 << 16  # that one choice of a channel holds for

cdef Channel* next_channel(PeerState* peer, Op* op, uint32_t refused) noexcept nogil
cdef void posted(PeerState* peer, Channel* channel, uint64_t bytes) noexcept nogil
cdef void rotate(PeerState* peer, uint32_t turn) noexcept nogil
cdef uint64_t cost_of(uint64_t mbps) noexcept nogil
cdef int usable(const PeerState* peer) noexcept nogil
cdef void begin_measure(Channel* channel) noexcept nogil
cdef void measure(Channel* channel) noexcept nogil
cdef void decay_costs(PeerState* peer) noexcept nogil
