from libc.stdint cimport int64_t, uint32_t, uint64_t

from aiote_native.posting cimport State
from aiote_native.structs cimport Channel, Fault, Op, PeerState, WorkRequest

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
