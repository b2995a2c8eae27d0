from libc.stdint cimport uint32_t, uint64_t

from aiote_native.progress cimport Progress
from aiote_native.structs cimport Channel, Op, PeerState

cdef class ChannelSet:
    cdef PeerState state
    cdef object core
    cdef Progress* engine
    cdef readonly bint closed
    cdef list endpoints
    cdef int mail_lost_with
    cdef int channels
    cdef uint64_t largest(self) noexcept nogil
    cdef int widest(self) noexcept nogil
    cdef Channel* channel_of(self, int number) except NULL
    cdef void drop_notice(self, Channel* channel) noexcept nogil
    cdef uint32_t in_flight_channels(self, uint64_t* ended) noexcept nogil
    cdef bint holds(self, const Channel* channel, const Op* op) noexcept nogil
    cdef bint is_noticed(self) noexcept
    cdef bint take_failure(self) noexcept

cdef uint64_t largest_of(const PeerState* peer) noexcept nogil
cdef int widest_of(const PeerState* peer) noexcept nogil
