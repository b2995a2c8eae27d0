from libc.stdint cimport uint32_t, uint64_t

from aiote_native.structs cimport Channel, Op, PeerState

# Placeholders for a rail that does not reach some memory: NO_REACH stands for its descriptor, NO_KEY for its key.
# NO_KEY is libfabric's value for a key that is not available.
cdef extern from *:
    """
    #define AIOTE_NO_REACH ((void*)1)
    #define AIOTE_NO_KEY UINT64_MAX
    """
    void* const NO_REACH "AIOTE_NO_REACH"
    const uint64_t NO_KEY "AIOTE_NO_KEY"

cdef enum:
    STREAK_BYTES = 1 << 16  # bytes for which one choice of a channel holds

cdef Channel* next_channel(PeerState* peer, Op* op, uint32_t refused) noexcept nogil
cdef void posted(PeerState* peer, Channel* channel, uint64_t bytes) noexcept nogil
cdef void rotate(PeerState* peer, uint32_t turn) noexcept nogil
cdef uint64_t cost_of(uint64_t mbps) noexcept nogil
cdef bint is_cut_off(const PeerState* peer, const Op* op) noexcept nogil
cdef int usable(const PeerState* peer) noexcept nogil
cdef void begin_measure(Channel* channel) noexcept nogil
cdef void measure(Channel* channel) noexcept nogil
cdef void decay_costs(PeerState* peer) noexcept nogil
