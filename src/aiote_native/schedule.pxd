from libc.stdint cimport uint32_t, uint64_t

from aiote_native.structs cimport Channel, Op, PeerState

cdef Channel* choose(PeerState* peer, const Op* op, uint32_t refused) noexcept nogil
cdef int usable(const PeerState* peer) noexcept nogil
cdef void begin_measure(Channel* channel) noexcept nogil
cdef void measure(Channel* channel) noexcept nogil
cdef void fade(PeerState* peer) noexcept nogil
