from libc.stdint cimport int64_t, uint32_t, uint64_t

from aiote_native.engine.progress cimport Progress
from aiote_native.engine.structs cimport Channel, Fault, Op, PeerState, State, WorkRequest

# The peer's account of a channel that both sides have shut: how often each immediate came, and which keys it does not
# know.
cdef struct Account:
    uint32_t* imm_data
    int64_t* counts
    uint64_t count
    uint64_t* unknown
    uint64_t unknown_count

cdef bint is_disconnect(int code) noexcept nogil
cdef void channel_fault(State* state, Channel* channel, Fault fault, int error) noexcept nogil
cdef void queue_failed(State* state, Channel* channel, int status) noexcept nogil
cdef void lose_request(State* state, WorkRequest* wr, int status, int provider_errno) noexcept nogil
cdef void confirm(State* state, Channel* channel, WorkRequest* wr) noexcept nogil
cdef void count_arrival(State* state, Channel* channel, uint32_t imm_data, uint32_t times) noexcept nogil
cdef void redone(State* state, Op* op) noexcept nogil
cdef bint is_abandoned(const Op* op) noexcept nogil
cdef bint is_part_of(const Op* op, const Op* whole) noexcept nogil
cdef uint32_t lost_keys(const Channel* channel, uint64_t* keys) noexcept nogil
cdef int64_t contradiction(Channel* channel, const Account* account) noexcept nogil
cdef int redo_all(State* state, Channel* channel, const Account* account) noexcept nogil

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
