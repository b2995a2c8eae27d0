from libc.stdint cimport uint32_t, uint64_t

from aiote_native.structs cimport Channel, Op, PeerState

# What stands for a rail that does not reach some memory: instead of its descriptor, and instead of its key. The second
# is what libfabric calls a key that is not available.
cdef extern from *:
    """
    #define AIOTE_NO_REACH ((void*)1)
    #define AIOTE_NO_KEY UINT64_MAX
    """
    void* const NO_REACH "AIOTE_NO_REACH"
    const uint64_t NO_KEY "AIOTE_NO_KEY"

cdef enum:
    STREAK_BYTES = 1 << 16  # that one choice of a channel holds for

cdef Channel* next_channel(PeerState* peer, Op* op, uint32_t refused) noexcept nogil
cdef void posted(PeerState* peer, Channel* channel, uint64_t bytes) noexcept nogil
cdef void rotate(PeerState* peer, uint32_t turn) noexcept nogil
cdef uint64_t cost_of(uint64_t mbps) noexcept nogil
cdef bint is_cut_off(const PeerState* peer, const Op* op) noexcept nogil
cdef int usable(const PeerState* peer) noexcept nogil
cdef void begin_measure(Channel* channel) noexcept nogil
cdef void measure(Channel* channel) noexcept nogil
cdef void decay_costs(PeerState* peer) noexcept nogil
