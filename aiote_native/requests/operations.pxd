from libc.stdint cimport int64_t, uint8_t, uint64_t

from aiote_native.cuda.driver cimport EventPool, Hold
from aiote_native.engine.posting cimport op_start
from aiote_native.engine.progress cimport Progress
from aiote_native.engine.structs cimport MAX_CHANNELS, MAX_RAILS, Op, PeerState, State

cdef class Waitable:
    cdef readonly bint is_over
    cdef public object on_over
    cdef public object waiter
    cdef int resolved(self) except -1

cdef int finish(Waitable item, list woken=*) except -1

cdef class LocalMemory:
    cdef object __weakref__
    cdef void* descs[MAX_RAILS]
    cdef uint8_t ranks[MAX_RAILS]
    cdef bint ranked
    cdef readonly uint64_t address
    cdef readonly uint64_t length
    cdef readonly bint writable
    cdef readonly int access
    cdef readonly object buffer
    cdef readonly tuple registrations
    cdef public uint64_t in_flight
    cdef public object on_idle
    cdef public object owner
    cdef public object events  # the EventPool of its device, where it is GPU memory
    cdef public bint closing
    cdef int leave(self) except -1

cdef class RemoteMemory:
    cdef public object link
    cdef readonly uint64_t lease
    cdef public object lease_flight
    cdef uint64_t bases[MAX_CHANNELS]
    cdef uint64_t keys[MAX_CHANNELS]
    cdef readonly int rails
    cdef readonly uint64_t length
    cdef readonly bint writable
    cdef readonly bint readable

cdef class PageIndex:
    cdef int64_t* values
    cdef readonly uint64_t count
    cdef int64_t least
    cdef int64_t most
    cdef void find_bounds(self) noexcept
    cdef int allocate(self, uint64_t count) except -1
    cdef bint copy_buffer(self, object indices) except -1

cdef int fill(Op* op, LocalMemory local, uint64_t local_offset, RemoteMemory remote, uint64_t remote_offset,
              uint64_t local_extent, uint64_t remote_extent, bint into_local) except -1

cdef class Operation(Waitable):
    cdef Op op
    cdef bint submitted
    cdef LocalMemory local
    cdef RemoteMemory remote
    cdef object kept
    cdef public object order   # the Order that it waits behind, if any
    cdef readonly str broken   # the GPU's error that made it fail
    cdef int take(self, LocalMemory local, uint64_t local_offset, RemoteMemory remote, uint64_t remote_offset,
                  uint64_t local_extent, uint64_t remote_extent, bint into_local) except -1
    cdef int take_pages(self, LocalMemory local, uint64_t local_offset, PageIndex here, uint64_t local_stride,
                        RemoteMemory remote, uint64_t remote_offset, PageIndex there, uint64_t remote_stride,
                        uint64_t page_bytes, bint into_local) except -1

cdef class NativeWaiter:
    cdef object loop
    cdef object cancelled_error
    cdef object callback
    cdef object context
    cdef list others
    cdef object message
    cdef bint is_done
    cdef bint is_cancelled
    cdef public bint _asyncio_future_blocking
    cdef int now(self) except -1
    cdef int resolve(self) except -1
    cdef int resolve_others(self) except -1

cdef class Pause:
    cdef NativeWaiter waiter
    cdef bint yielded

cdef class WaiterQueue:
    cdef public object loop
    cdef object waiters  # a deque; None before the first wait
    cdef int wake_first(self, waker) except -1

cpdef int wake(object waiter) except -1
cpdef int run(object waiter) except -1
cdef object wake_all(list waiters, bint direct, listener)

cdef class Flight:
    cdef dict pending
    cdef public object changed
    cdef public bint shut
    cdef readonly uint64_t landed
    cdef readonly uint64_t landed_bytes
    cdef int leave(self, object request, bint failed, uint64_t nbytes) except -1
    cdef int notify(self, object request) except -1

cdef class Order:
    cdef Hold hold
    cdef list pools
    cdef Progress* engine
    cdef Hold* begin(self, Progress* engine) noexcept
    cdef int leave(self) except -1
    cdef void give_events(self) noexcept

cdef void hold_back(State* state, PeerState* peer, Op* op, Hold* hold) noexcept nogil


cdef inline Hold* hold_of(object order, Progress* engine) noexcept:
    """Return the points that a request waits behind, as it is submitted; NULL for none."""
    return NULL if order is None else (<Order> order).begin(engine)


cdef inline void start_behind(State* state, PeerState* peer, Op* op, Hold* hold) noexcept nogil:
    """Start a transfer once its hold is passed; at once where that is NULL."""
    op.peer = peer
    if hold == NULL or peer.failed or op.parts == 0:
        op_start(state, peer, op)
        return
    hold_back(state, peer, op, hold)

cdef void start_targets_behind(State* state, Op* parent, Hold* hold) noexcept nogil
cdef void look_at_holds(State* state) noexcept nogil
