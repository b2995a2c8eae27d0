"""Transfers that wait for a GPU stream: they are checked and count as in flight, but are not posted yet.

Like transfers that wait for a flag (proxy.pyx) they stand in the `armed` queue of their peer, so everything that ends a
request (a cancellation, a lost peer, a revoked lease, a closed engine) ends one of these as well. The engine queries
their events every few rounds, and before the loop sleeps; of one stream only the oldest that is not done, because those
behind it are later. A transfer whose stream is done joins its peer's queue, behind others that have passed it
meanwhile.
"""

cimport cython
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memset

from aiote_native.cuda.driver cimport described
from aiote_native.cuda.events cimport HELD_MOST, EventPool, Hold, hold_state
from aiote_native.posting cimport State, link_tail, op_end, op_fail, op_start, unlink
from aiote_native.progress cimport Progress, alive, lock, unlock
from aiote_native.structs cimport Op, PeerState

cdef enum:
    STREAMS = 8  # streams that one look remembers as late


@cython.no_gc_clear  # a cleared one could not give its events back
cdef class Order:
    """The points in streams that one request waits behind. They are recorded when the request is submitted."""

    def __cinit__(self):
        memset(&self.hold, 0, sizeof(Hold))
        self.pools = []
        self.engine = NULL

    def __dealloc__(self):
        self.give_events()

    def add(self, EventPool pool not None, uint64_t stream) -> None:
        """Wait behind the work that a stream of the pool's device has now. Raises ValueError, with the reason, if the
        stream cannot be waited for. A request behind a broken device fails when it is submitted.
        """
        cdef int code
        if self.hold.count == HELD_MOST:
            raise ValueError(f"the transfer waits for more than {HELD_MOST} devices, which is the limit")
        code = pool.record(stream, &self.hold.points[self.hold.count])
        if code:
            self.hold.error = code
            return
        self.hold.count += 1
        self.pools.append(pool)

    @property
    def empty(self) -> bool:
        """Whether the request waits for nothing."""
        return self.hold.count == 0 and self.hold.error == 0

    @property
    def failure(self) -> str:
        """Why its points will never be passed; empty where no error is known."""
        return described(self.hold.error) if self.hold.error else ""

    cdef Hold* begin(self, Progress* engine) noexcept:
        self.engine = engine
        return &self.hold

    cdef int leave(self) except -1:
        """Leave the engine's list, because the request is over. Once this returns, the engine does not look at it."""
        if self.engine != NULL and alive(self.engine):
            with nogil:
                lock(self.engine)
                hold_unlink(&self.engine.state, &self.hold)
                unlock(self.engine)
        self.give_events()
        return 0

    cdef void give_events(self) noexcept:
        cdef int i
        for i in range(len(self.pools)):
            (<EventPool> self.pools[i]).give(self.hold.points[i].event)
        self.pools.clear()
        self.hold.count = 0


cdef Hold* hold_of(object order, Progress* engine) noexcept:
    """Return the points that a request waits behind, as it is submitted; NULL for none."""
    return NULL if order is None else (<Order> order).begin(engine)


cdef void hold_link(State* state, Hold* hold) noexcept nogil:
    hold.linked = True
    hold.next = NULL
    hold.prev = state.last_hold
    if state.last_hold != NULL:
        state.last_hold.next = hold
    else:
        state.holds = hold
    state.last_hold = hold


cdef void hold_unlink(State* state, Hold* hold) noexcept nogil:
    if not hold.linked:
        return
    hold.linked = False
    if hold.prev != NULL:
        hold.prev.next = hold.next
    else:
        state.holds = hold.next
    if hold.next != NULL:
        hold.next.prev = hold.prev
    else:
        state.last_hold = hold.prev


cdef void start_behind(State* state, PeerState* peer, Op* op, Hold* hold) noexcept nogil:
    """Start a transfer once its hold is passed; at once where that is NULL."""
    op.peer = peer
    if hold == NULL or peer.failed or op.parts == 0:
        op_start(state, peer, op)
        return
    op.armed = True
    link_tail(state, peer, op)
    hold.op = op
    hold_link(state, hold)


cdef void start_targets_behind(State* state, Op* parent, Hold* hold) noexcept nogil:
    """Start every target of a request once its hold is passed (NULL: at once). It is over when all targets are."""
    cdef Op* op
    cdef uint32_t i
    parent.posted_all = True
    parent.outstanding = parent.child_count
    if parent.child_count == 0:
        op_end(state, parent)
        return
    if hold != NULL:
        hold.op = parent
        hold_link(state, hold)
    for i in range(parent.child_count):
        op = &parent.children[i]
        if hold == NULL or op.peer.failed or op.parts == 0:
            op_start(state, op.peer, op)
        else:
            op.armed = True
            link_tail(state, op.peer, op)


cdef void release_one(State* state, Op* op, int error) noexcept nogil:
    if op.over or not op.armed:
        return
    unlink(state, op.peer, op)
    op.armed = False
    if error:
        op_fail(state, op, error, -1)
    else:
        op_start(state, op.peer, op)


cdef void release(State* state, Op* op, int error) noexcept nogil:
    """Post a transfer, or every target of one; or end it with an error."""
    cdef uint32_t i
    if op.child_count == 0:
        release_one(state, op, error)
    for i in range(op.child_count):
        release_one(state, &op.children[i], error)


cdef bint is_late(const Hold* hold, void** streams, int count) noexcept nogil:
    """Return whether the first stream that this waits for is known to be late."""
    cdef int i
    for i in range(count):
        if (streams[2 * i] == hold.points[hold.first].context
                and streams[2 * i + 1] == hold.points[hold.first].stream):
            return True
    return False


cdef void look_at_holds(State* state) noexcept nogil:
    """Start the transfers whose streams are done, in the order of their submission, and end those of broken devices."""
    cdef void* late[2 * STREAMS]
    cdef Hold* hold = state.holds
    cdef Hold* following
    cdef int code
    cdef int count = 0
    while hold != NULL:
        following = hold.next
        if (<Op*> hold.op).over:
            hold_unlink(state, hold)
        elif not is_late(hold, late, count):
            code = hold_state(hold)
            if code:
                hold_unlink(state, hold)
                state.events += 1
                release(state, <Op*> hold.op, min(code, 0))
            elif count < STREAMS:
                late[2 * count] = hold.points[hold.first].context
                late[2 * count + 1] = hold.points[hold.first].stream
                count += 1
        hold = following
