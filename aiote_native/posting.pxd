from libc.stdint cimport uint32_t, uint64_t

from aiote_native.counters cimport Table
from aiote_native.cuda.events cimport Hold
from aiote_native.structs cimport (
    MAX_RAILS, Batch, Channel, DoneList, Op, PeerState, Post, Split, WorkRequest, Worklists)

# The state that all channels of an engine share. The engine's lock guards it.
cdef struct State:
    DoneList done
    Table counters
    PeerState* peers
    Batch batch
    Worklists lists
    uint64_t outstanding     # work requests of transfers and messages that a NIC holds
    uint64_t queued          # transfers and messages with something left to post
    uint64_t blocked         # posts that a provider refused for now in the last round
    uint64_t inbox           # messages that arrived and that the user has not taken yet
    uint64_t channels        # open channels
    uint64_t failures        # failed peers, and channels to look at, that Python was not told of yet
    uint64_t events          # everything that ever happened: a changed value means that there was progress
    uint64_t posted
    uint64_t completed
    uint64_t refused[MAX_RAILS]  # posts that a rail refused
    uint64_t immediates
    uint64_t wakeups
    Hold* holds              # the holds of transfers that wait for a GPU stream, in the order of submission
    Hold* last_hold
    uint64_t carried[MAX_RAILS]  # bytes of our own requests that a rail carried
    uint64_t ended[MAX_RAILS]    # work requests of a rail that ended on channels which no longer exist

cdef int split_part(uint64_t length, uint32_t lanes, uint64_t largest, uint64_t smallest, bint counted,
                    Split* out) noexcept nogil
cdef void split_op(Op* op, const PeerState* peer, uint64_t largest, uint64_t smallest) noexcept nogil
cdef void piece_of(uint64_t length, uint64_t pieces, uint64_t j, uint64_t* offset, uint64_t* size) noexcept nogil

cdef int post_on(State* state, Channel* channel, const Post* args, void* owner) noexcept nogil
cdef void give_back(Channel* channel, WorkRequest* wr) noexcept nogil

cdef void link_tail(State* state, PeerState* peer, Op* op) noexcept nogil
cdef void unlink(State* state, PeerState* peer, Op* op) noexcept nogil
cdef void op_start(State* state, PeerState* peer, Op* op) noexcept nogil
cdef void op_cancel(State* state, Op* op) noexcept nogil
cdef void op_completed(State* state, Op* op, int status, int provider_errno, int rail, uint64_t length) noexcept nogil
cdef void describe_post(Op* op, Channel* channel, Post* args) noexcept nogil
cdef void op_end(State* state, Op* op) noexcept nogil
cdef void op_fail(State* state, Op* op, int status, int rail) noexcept nogil
cdef void pump_peer(State* state, PeerState* peer) noexcept nogil
cdef void peer_fail(State* state, PeerState* peer, int error, int rail) noexcept nogil
