from libc.stdint cimport uint32_t, uint64_t

from aiote_native.engine.structs cimport Channel, Op, PeerState, Post, Queue, Split, State, WorkRequest
from aiote_native.engine.worklists cimport pend


cdef inline void give_back(Channel* channel, WorkRequest* wr) noexcept nogil:
    wr.busy = False
    wr.owner = NULL
    wr.next = channel.spare
    channel.spare = wr


cdef inline Queue* queue_of(PeerState* peer, const Op* op) noexcept nogil:
    return &peer.armed if op.armed else &peer.probes if op.proof else &peer.queue


cdef inline void link_tail(State* state, PeerState* peer, Op* op) noexcept nogil:
    cdef Queue* queue = queue_of(peer, op)
    op.queued = True
    op.next = NULL
    op.prev = queue.tail
    if queue.tail == NULL:
        queue.head = op
    else:
        queue.tail.next = op
    queue.tail = op
    state.queued += 1
    pend(peer)


cdef inline void unlink(State* state, PeerState* peer, Op* op) noexcept nogil:
    cdef Queue* queue = queue_of(peer, op)
    if not op.queued:
        return
    op.queued = False
    if op.prev == NULL:
        queue.head = op.next
    else:
        op.prev.next = op.next
    if op.next == NULL:
        queue.tail = op.prev
    else:
        op.next.prev = op.prev
    op.next = op.prev = NULL
    state.queued -= 1

cdef int split_part(uint64_t length, uint32_t lanes, uint64_t largest, uint64_t smallest, bint counted,
                    Split* out) noexcept nogil
cdef void split_op(Op* op, const PeerState* peer, uint64_t largest, uint64_t smallest) noexcept nogil
cdef void piece_of(uint64_t length, uint64_t pieces, uint64_t j, uint64_t* offset, uint64_t* size) noexcept nogil

cdef int post_on(State* state, Channel* channel, const Post* args, void* owner) noexcept nogil

cdef void op_start(State* state, PeerState* peer, Op* op) noexcept nogil
cdef void op_cancel(State* state, Op* op) noexcept nogil
cdef void op_completed(State* state, Op* op, int status, int provider_errno, int rail, uint64_t length) noexcept nogil
cdef void describe_post(Op* op, Channel* channel, Post* args) noexcept nogil
cdef void op_end(State* state, Op* op) noexcept nogil
cdef void op_fail(State* state, Op* op, int status, int rail) noexcept nogil
cdef void pump_peer(State* state, PeerState* peer) noexcept nogil
cdef void peer_fail(State* state, PeerState* peer, int error, int rail) noexcept nogil

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

cdef void gather(const Op* op, const Channel* channel, uint64_t most, uint64_t bytes_most, Post* args) noexcept nogil
cdef uint64_t room_of(const Channel* channel, const Post* args) noexcept nogil

cdef bint has_work(const PeerState* peer) noexcept nogil
cdef void pump_pending(State* state) noexcept nogil
