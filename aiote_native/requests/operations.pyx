"""One operation each: its memory, the coroutine that awaits it, its group, and the GPU stream that it waits for."""

from collections import deque

cimport cython
from cpython.buffer cimport PyBUF_C_CONTIGUOUS, PyBUF_FORMAT, PyBuffer_Release, PyObject_CheckBuffer, PyObject_GetBuffer
from cpython.exc cimport PyErr_SetObject, PyErr_WriteUnraisable
from cpython.number cimport PyNumber_Index
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset, strcmp

from aiote_native.cuda.driver cimport HELD_MOST, EventPool, Hold, described, hold_state
from aiote_native.engine.posting cimport NO_KEY, NO_REACH, link_tail, op_end, op_fail, op_start, unlink
from aiote_native.engine.progress cimport Progress, alive, lock, unlock
from aiote_native.engine.provider cimport NativeDevice, NicRegistration
from aiote_native.engine.structs cimport MAY_ALL, MAY_WRITE, Op, PeerState, State
from aiote_native.system.buffers cimport AcquiredBuffer, refuse_mask

# The Python objects of a transfer, each with its native structure inside.
#
# `LocalMemory` and `RemoteMemory` carry what rails need to know of a region, `PageIndex` is a checked copy of page
# numbers, `Operation` is the transfer. An operation keeps the memories and indices that it uses alive until it is over.


cdef class Waitable:
    """Something that will be over: then `Core.reap` wakes its `waiter` and calls `on_over(self)`, once.

    A waiter is a future of the event loop, or a list of them.
    """

    cdef int resolved(self) except -1:
        return 0


cdef int finish(Waitable item, list woken=None) except -1:
    """Report one end, once, and drop the reference that the core had. Its waiters join `woken`, or are woken here."""
    if item.is_over:
        return 0
    item.is_over = True
    waiter = item.waiter
    item.waiter = None
    # These calls are its owner's: a mistake in them must not keep this item, or others, from hearing of their ends.
    try:
        item.resolved()
        callback = item.on_over
        item.on_over = None
        if callback is not None:
            callback(item)
    except BaseException as error:
        PyErr_SetObject(type(error), error)
        PyErr_WriteUnraisable(item)
    if waiter is None:
        pass
    elif woken is None:
        wake(waiter)
    elif type(waiter) is list:
        woken.extend(waiter)
    else:
        woken.append(waiter)
    Py_DECREF(item)
    return 0


cdef class Unreached(NicRegistration):
    """Stands for memory that a rail does not reach: peers are given a key that none of them uses."""

    def __init__(self):
        self.key = NO_KEY

    def close(self) -> None:
        """Return at once, because no memory was registered."""


cdef int adopt(LocalMemory self, registrations) except -1:
    """Take over registrations that exist already, one for each rail."""
    cdef NicRegistration registration
    cdef int rail = 0
    for made in registrations:
        registration = Unreached() if made is None else made
        self.registrations += (registration,)
        self.descs[rail] = NO_REACH if made is None else registration.desc
        rail += 1
    return 0


cdef class LocalMemory:
    """Memory registered with every rail of an engine; it keeps its buffer exported until it is closed.

    `access` is what peers may do with it, of MAY_READ and MAY_WRITE. With a descriptor, `fd`, rails reach it through
    that DMA-BUF, in which it begins at `offset`. With `staged`, the kinds of rail that can stage it do so. With
    `registrations`, it takes over those, one for each rail, None for a rail that does not reach the memory.
    """

    def __init__(self, AcquiredBuffer buffer, list devices, int access=MAY_ALL, *, int fd=-1,
                 uint64_t offset=0, bint staged=False, registrations=None):
        cdef NicRegistration registration
        cdef NativeDevice device
        cdef int rail = 0
        if self.buffer is not None:
            raise RuntimeError("the memory is registered already")
        if len(devices) > MAX_RAILS:
            raise ValueError(f"the memory has {len(devices)} rails, but an engine drives at most {MAX_RAILS}")
        self.buffer = buffer
        self.address = buffer.address
        self.length = buffer.nbytes
        self.writable = not buffer.readonly
        self.access = access if self.writable else access & ~MAY_WRITE
        self.registrations = ()
        if registrations is not None:
            adopt(self, registrations)
            return
        try:
            for device in devices:
                if staged and device.stages:
                    registration = device.register_gpu(self.address, self.length, self.writable, access)
                elif fd >= 0:
                    registration = device.register_dmabuf(fd, offset, self.length, self.address, self.writable, access)
                else:
                    registration = device.register(self.address, self.length, self.writable, access)
                self.registrations += (registration,)
                self.descs[rail] = registration.desc
                rail += 1
        except BaseException:
            self.close()
            raise

    def bind(self, bytes holder) -> None:
        """Make the keys serve only the peer of that name, on the rails that know names of peers."""
        for registration in self.registrations:
            (<NicRegistration> registration).bind(holder)

    def rank(self, ranks) -> None:
        """Set how far each rail is from the memory: 0 for the nearest, the same for those that are equally near."""
        cdef int rail
        for rail in range(min(len(ranks), MAX_RAILS)):
            self.ranks[rail] = min(ranks[rail], MAX_RAILS - 1)
        self.ranked = len(set(ranks)) > 1

    cdef int leave(self) except -1:
        self.in_flight -= 1
        if self.in_flight == 0 and self.on_idle is not None:
            self.on_idle()
        return 0

    @property
    def keys(self) -> tuple[tuple[int, int], ...]:
        """The key and the address of the first byte, for each rail, as peers need them."""
        return tuple((registration.key, registration.base) for registration in self.registrations)

    def retire(self) -> bool:
        """Refuse the keys from here on, and return whether a copy from or to the memory goes on."""
        return any([registration.retire() for registration in self.registrations])

    def close(self) -> None:
        """Deregister and release the buffer. Idempotent; raises RuntimeError while transfers use it."""
        if self.in_flight:
            raise RuntimeError(f"{self.in_flight} transfers still use this memory")
        for registration in self.registrations:
            registration.close()
        self.registrations = ()
        if self.buffer is not None:
            self.buffer.release()


cdef class RemoteMemory:
    """A peer's memory: a key and an address for each of its rails. `lease_flight` is the flight of the requests
    through its lease, if it belongs to one.
    """

    def __init__(self, uint64_t length, bint writable, keys, uint64_t lease=0, bint readable=True):
        cdef int rail = 0
        if len(keys) > MAX_CHANNELS:
            raise ValueError(f"the remote memory has {len(keys)} keys, but a peer has at most {MAX_CHANNELS} rails")
        self.length = length
        self.writable = writable
        self.readable = readable
        self.rails = len(keys)
        self.lease = lease
        for key, base in keys:
            self.keys[rail] = key
            self.bases[rail] = base
            rail += 1


cdef class PageIndex:
    """A copy of page numbers as 64-bit integers, which later changes of the caller's list do not affect."""

    def __cinit__(self):
        self.values = NULL

    def __init__(self, indices):
        cdef uint64_t i = 0
        if self.values != NULL:
            raise RuntimeError("the page index is already filled")
        refuse_mask(indices)
        if PyObject_CheckBuffer(indices) and self.copy_buffer(indices):
            self.find_bounds()
            return
        items = indices.tolist() if hasattr(indices, "tolist") else list(indices)
        self.allocate(len(items))
        for item in items:
            self.values[i] = PyNumber_Index(item)
            i += 1
        self.find_bounds()

    cdef void find_bounds(self) noexcept:
        """Find the least and the greatest number, so that a check of the bounds need not look at all of them."""
        cdef uint64_t i
        self.least = self.most = self.values[0] if self.count else 0
        for i in range(1, self.count):
            self.least = min(self.least, self.values[i])
            self.most = max(self.most, self.values[i])

    cdef int allocate(self, uint64_t count) except -1:
        self.values = <int64_t*> malloc((count or 1) * sizeof(int64_t))
        if self.values == NULL:
            raise MemoryError
        self.count = count
        return 0

    cdef bint copy_buffer(self, object indices) except -1:
        """Copy a contiguous row of native 64-bit integers at once; return False for any other buffer."""
        cdef Py_buffer view
        try:
            PyObject_GetBuffer(indices, &view, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS)
        except (BufferError, ValueError):  # NumPy raises the second
            return False
        try:
            if view.ndim != 1 or view.itemsize != 8 or (strcmp(view.format, b"l") and strcmp(view.format, b"q")):
                return False
            self.allocate(view.len // 8)
            memcpy(self.values, view.buf, view.len)
            return True
        finally:
            PyBuffer_Release(&view)

    def __dealloc__(self):
        free(self.values)

    def __len__(self):
        return self.count

    def __getitem__(self, uint64_t i):
        if i >= self.count:
            raise IndexError(i)
        return self.values[i]

    def first_outside(self, uint64_t page_bytes, uint64_t stride, uint64_t offset, uint64_t length) -> int:
        """Return the position of the first page that leaves [0, length), or -1: page i covers page_bytes bytes from
        offset + index[i] * stride."""
        cdef uint64_t i, limit
        cdef int64_t bad = -1
        if self.count == 0:
            return -1
        if offset > length or page_bytes > length - offset:
            return 0
        # The largest index that fits. Indices are compared, never multiplied, so no product can overflow.
        limit = (length - offset - page_bytes) // stride if stride else 0xFFFFFFFFFFFFFFFFULL
        if self.least >= 0 and <uint64_t> self.most <= limit:
            return -1
        with nogil:
            for i in range(self.count):
                if self.values[i] < 0 or <uint64_t> self.values[i] > limit:
                    bad = i
                    break
        return bad


cdef int fill(Op* op, LocalMemory local, uint64_t local_offset, RemoteMemory remote, uint64_t remote_offset,
              uint64_t local_extent, uint64_t remote_extent, bint into_local) except -1:
    """Check both ranges before anything is posted, because providers fail late, hang or lie about a bad one. Raises
    ValueError.
    """
    if local is not None:
        if local_offset > local.length or local_extent > local.length - local_offset:
            raise ValueError(f"local range {local_offset}+{local_extent} leaves a region of {local.length} bytes")
        if into_local and not local.writable:
            raise ValueError("the local memory is read-only")
        op.local_address = local.address + local_offset
        op.local_desc = local.descs
        op.ranks = local.ranks if local.ranked else NULL
    if remote is not None:
        if remote_offset > remote.length or remote_extent > remote.length - remote_offset:
            raise ValueError(
                f"remote range {remote_offset}+{remote_extent} leaves a region of {remote.length} bytes")
        if not into_local and not remote.writable:
            raise ValueError("the remote memory is read-only")
        if into_local and not remote.readable:
            raise ValueError("the remote memory is write-only")
        op.remote_base = remote.bases
        op.remote_key = remote.keys
        op.remote_offset = remote_offset
    return 0


cdef class Operation(Waitable):
    """A transfer. It is made empty, handed to one of `Core.submit_*`, and is over when `is_over`."""

    def __cinit__(self):
        memset(&self.op, 0, sizeof(Op))
        self.op.done.owner = <PyObject*> self
        self.op.rail = self.op.pin = -1

    @property
    def errno(self) -> int:
        """The positive error number of the first thing that failed, or 0."""
        return -self.op.status

    @property
    def provider_errno(self) -> int:
        """The provider's own error number, where it gave one."""
        return self.op.provider_errno

    @property
    def rail(self) -> int:
        """The rail of the first failure, or of the last post; -1 where there was none."""
        return self.op.rail

    def prefer(self, int rail) -> None:
        """Use this rail only, for as long as it is there. Raises RuntimeError once the transfer was submitted."""
        if self.submitted:
            raise RuntimeError("the operation was already submitted")
        self.op.pin = rail

    @property
    def was_cancelled(self) -> bool:
        return self.op.cancelled

    @property
    def confirmed_bytes(self) -> int:
        """Bytes that are known to have arrived."""
        return self.op.confirmed

    @property
    def total_bytes(self) -> int:
        return self.op.total

    cdef int take(self, LocalMemory local, uint64_t local_offset, RemoteMemory remote, uint64_t remote_offset,
                  uint64_t local_extent, uint64_t remote_extent, bint into_local) except -1:
        if self.submitted:
            raise RuntimeError("the operation was already submitted")
        fill(&self.op, local, local_offset, remote, remote_offset, local_extent, remote_extent, into_local)
        self.local = local
        self.remote = remote
        return 0

    cdef int take_pages(self, LocalMemory local, uint64_t local_offset, PageIndex here, uint64_t local_stride,
                        RemoteMemory remote, uint64_t remote_offset, PageIndex there, uint64_t remote_stride,
                        uint64_t page_bytes, bint into_local) except -1:
        """Take pages, whose bounds the caller has checked; `kept` holds their indices until the end."""
        self.take(local, local_offset, remote, remote_offset, 0, 0, into_local)
        self.kept = (here, there)
        self.op.local_index = here.values
        self.op.local_stride = local_stride
        self.op.remote_index = there.values
        self.op.remote_stride = remote_stride
        self.op.part_bytes = page_bytes
        self.op.parts = here.count
        return 0

    cdef int resolved(self) except -1:
        cdef LocalMemory local = self.local
        self.local = None
        self.remote = None
        self.kept = None
        if self.order is not None:
            (<Order> self.order).leave()
        if local is not None and local.events is not None and self.op.status != 0:
            self.broken = next(filter(None, [made.failure for made in local.registrations]), None)
        if local is not None:
            local.leave()
        return 0


# The objects on which coroutines sleep, and how they are woken.
#
# asyncio's tasks accept a `NativeWaiter` as a future (they look for `_asyncio_future_blocking`, and so does uvloop's
# loop, which runs the same tasks). A future makes its task run in the loop's next turn, which costs a handle, a call of
# the selector and 2 us. A waiter that is woken in a callback of the loop, where no other task is running, runs its task
# right there, which is what that next turn would do.


@cython.freelist(64)
cdef class NativeWaiter:
    """One sleep of one task. `loop` is asyncio's or uvloop's; a cancelled sleep raises `cancelled_error`."""

    def __init__(self, loop, cancelled_error):
        self.loop = loop
        self.cancelled_error = cancelled_error

    def get_loop(self):
        return self.loop

    def done(self) -> bool:
        return self.is_done

    def cancelled(self) -> bool:
        return self.is_cancelled

    def result(self) -> None:
        if self.is_cancelled:
            raise self.cancelled_error() if self.message is None else self.cancelled_error(self.message)
        if not self.is_done:
            raise RuntimeError("the waiter was not woken yet")

    def add_done_callback(self, callback, *, context=None) -> None:
        """Call `callback`, a task's wake-up, when this is over. Usually there is one, but any number may be added."""
        if self.callback is not None:
            self.others = [*(self.others or ()), (callback, context)]
            return
        self.callback = callback
        self.context = context
        if self.is_done:
            self.resolve()

    def set_result(self, value) -> None:
        """Wake the task in the loop's next turn."""
        if self.is_done:
            raise RuntimeError("the waiter was already woken")
        self.is_done = True
        self.resolve()

    def cancel(self, msg=None) -> bool:
        """Make the task raise `cancelled_error`; the task that is cancelled calls this."""
        if self.is_done:
            return False
        self.is_done = self.is_cancelled = True
        self.message = msg
        self.resolve()
        return True

    cdef int resolve(self) except -1:
        callback, self.callback = self.callback, None
        if callback is not None:
            self.loop.call_soon(callback, self, context=self.context)
        if self.others is not None:
            self.resolve_others()
        return 0

    cdef int resolve_others(self) except -1:
        others, self.others = self.others, None
        for callback, context in others:
            self.loop.call_soon(callback, self, context=context)
        return 0

    cdef int now(self) except -1:
        """Run the task at once. Only for a callback of the loop, because a task must not run inside another one."""
        if self.is_done:
            return 0
        self.is_done = True
        callback, self.callback = self.callback, None
        if callback is None:
            return 0
        if self.others is not None:
            self.resolve_others()
        context = self.context
        if context is None:
            callback(self)
        else:
            context.run(callback, self)
        return 0

    def __await__(self):
        cdef Pause pause = Pause.__new__(Pause)
        pause.waiter = self
        return pause

    __iter__ = __await__


cdef class Pause:
    """The iterator of one await of a waiter."""

    def __iter__(self):
        return self

    def __next__(self):
        if not self.yielded and not self.waiter.is_done:
            self.yielded = True
            self.waiter._asyncio_future_blocking = True
            return self.waiter
        self.waiter.result()
        raise StopIteration

    def send(self, value):
        return self.__next__()

    def throw(self, kind, error=None, trace=None):
        if error is None:
            error = kind() if isinstance(kind, type) else kind
        raise error

    def close(self):
        pass


cpdef int wake(object waiter) except -1:
    """Wake the task that awaits it, soon; does nothing if it was woken before, or if its loop was closed."""
    if type(waiter) is list:
        for one in waiter:
            wake(one)
        return 0
    try:
        if not waiter.done():
            waiter.set_result(None)
    except RuntimeError:
        pass
    return 0


cpdef int run(object waiter) except -1:
    """Run the task that awaits it at once, if the loop allows that. Only for a callback of the loop."""
    if type(waiter) is NativeWaiter:
        return (<NativeWaiter> waiter).now()
    return wake(waiter)


cdef class WaiterQueue:
    """The tasks that wait for one condition, the longest wait first. `loop` makes their waiters."""

    def __cinit__(self, loop=None):
        self.loop = loop

    def __len__(self):
        return 0 if self.waiters is None else len(self.waiters)

    def enter(self) -> Waiter:
        """Return a new waiter at the end of the queue."""
        waiter = self.loop.waiter()
        if self.waiters is None:
            self.waiters = deque()
        self.waiters.append(waiter)
        return waiter

    def leave(self, waiter) -> bool:
        """Take a waiter out of the queue; return False if it is not there."""
        if waiter not in self.waiters:
            return False
        self.waiters.remove(waiter)
        return True

    cdef int wake_first(self, waker) except -1:
        while self.waiters:
            waiter = self.waiters.popleft()
            if not waiter.done():
                if waker is None:
                    wake(waiter)
                else:
                    waker(waiter)
                break
        return 0

    def wake_one(self, waker=None) -> None:
        """Wake the task that has waited longest, if any waits, or pass its waiter to `waker`."""
        if self.waiters is not None:
            self.wake_first(waker)

    def wake_all(self, waker=None) -> None:
        """Wake all tasks that wait now, or pass their waiters to `waker`."""
        if self.waiters is not None:
            for _ in range(len(self.waiters)):
                self.wake_first(waker)


cdef object wake_all(list waiters, bint direct, listener):
    """Wake the waiters, at once where `direct` allows it, and call the listener, if there is one.

    Return the last exception that is not a task's own. An interrupt in one task ends the loop, but the other waiters
    have to hear of their own ends first.
    """
    raised = None
    for waiter in waiters:
        if direct and type(waiter) is NativeWaiter:
            try:
                (<NativeWaiter> waiter).now()
            except BaseException as error:
                raised = error
        else:
            wake(waiter)
    if listener is not None:
        try:
            listener()
        except BaseException as error:
            raised = error
    return raised


# Groups of requests that one owner follows together: the requests of one job, or those through one lease.
#
# Awaiting a request costs a waiter, an entry in its list, and a turn of its task. A caller with sixteen requests in
# flight often needs only the failures and the end of the last one, and is called for just these.


cdef class Flight:
    """The requests of a flight that are not over. Iterating goes over a copy, oldest first.

    The flight calls `changed(request)` for each request that fails, when that is over, and `changed(None)` when the
    last one is over and has not failed. It calls in the middle of a round, so `changed` may only record the call.
    `shut` belongs to the owner, which sets it to keep new requests out; the code that starts requests looks at it.
    `landed` counts the requests that went well, and `landed_bytes` their bytes.
    """

    def __cinit__(self, changed=None):
        self.pending = {}  # a dict keeps the order in which they began, and a set would not
        self.changed = changed

    def __len__(self):
        return len(self.pending)

    def __iter__(self):
        return iter(list(self.pending))

    def enter(self, request) -> None:
        """Add a request that starts."""
        self.pending[request] = None

    def drop(self, request) -> None:
        """Remove a request that never started, or whose end is not for this flight to judge."""
        self.pending.pop(request, None)
        if not self.pending:
            self.notify(None)

    cdef int leave(self, object request, bint failed, uint64_t nbytes) except -1:
        """Record that a request is over."""
        if self.pending.pop(request, self) is self:
            return 0
        if not failed:
            self.landed += 1
            self.landed_bytes += nbytes
        if failed:
            self.notify(request)
        elif not self.pending:
            self.notify(None)
        return 0

    cdef int notify(self, object request) except -1:
        if self.changed is None:
            return 0
        # The callback is its owner's: a mistake in it must not keep others from hearing of this end.
        try:
            self.changed(request)
        except BaseException as error:
            PyErr_SetObject(type(error), error)
            PyErr_WriteUnraisable(self)
        return 0


# Transfers that wait for a GPU stream: they are checked and count as in flight, but are not posted yet.
#
# Like transfers that wait for a flag (threaded.pyx) they stand in the `armed` queue of their peer, so everything that
# ends a request (a cancellation, a lost peer, a revoked lease, a closed engine) ends one of these as well. The engine
# queries their events every few rounds, and before the loop sleeps; of one stream only the oldest that is not done,
# because those behind it are later. A transfer whose stream is done joins its peer's queue, behind others that have
# passed it meanwhile.

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


cdef void hold_back(State* state, PeerState* peer, Op* op, Hold* hold) noexcept nogil:
    """Let a transfer wait in the `armed` queue of its peer until its hold is passed."""
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
