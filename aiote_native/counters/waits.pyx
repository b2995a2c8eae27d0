"""Waits for counts, one or several, and for values in memory; and the ranges that Python holds."""

cimport cython
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free
from libc.string cimport memset

import sys

from aiote_native.channels.peers cimport PeerLink
from aiote_native.counters.table cimport (
    IMMEDIATE_BITS, UNITS, WAIT_OVER, WAIT_PENDING, WAIT_SATISFIED, add_peer, add_range, drop_if_empty, enqueue,
    remove_range, table_get, withdraw)
from aiote_native.engine.core cimport Core
from aiote_native.engine.progress cimport Progress, alive, kick, lock, unlock, usable, watch_link, watch_unlink
from aiote_native.requests.operations cimport Waitable, finish
from aiote_native.system.buffers cimport AcquiredBuffer

# Awaitables other than transfers: counts of immediates, and values in memory.

cdef object MAX_COUNTS = 1 << 40


cdef CounterHandle open_counter(object core, Progress* engine, uint32_t imm):
    cdef CounterHandle handle = CounterHandle.__new__(CounterHandle)
    usable(engine)
    if imm >> IMMEDIATE_BITS:
        raise ValueError(f"immediate {imm:#x} does not fit in {IMMEDIATE_BITS} bits")
    with nogil:
        lock(engine)
        handle.counter = table_get(&engine.state.counters, imm)
        if handle.counter != NULL:
            handle.counter.handles += 1
            handle.counter.opened += 1
            handle.counter.dropped = False
        unlock(engine)
    if handle.counter == NULL:
        raise OverflowError(f"{engine.state.counters.limit} immediates are in use, which is the limit")
    handle.core = core
    handle.own_loop = core.own_loop
    handle.engine = engine
    handle.imm = imm
    return handle


@cython.no_gc_clear  # a cleared handle would have lost the core that its counter lives in
cdef class CounterHandle:
    """A handle of one immediate's count. The count lives while it is not zero or has a handle."""

    @property
    def value(self) -> int:
        """Whole writes that arrived and were not consumed."""
        cdef uint64_t units
        if self.counter == NULL or not alive(self.engine):
            return 0
        with nogil:
            lock(self.engine)
            units = self.counter.units
            unlock(self.engine)
        return units // UNITS

    def wait(self, CounterWait waiting, uint64_t n) -> None:
        """Queue a wait for n counts. It is over when they have been consumed for it."""
        usable(self.engine)
        if self.counter == NULL:
            raise RuntimeError("the counter is closed")
        if n > <uint64_t> MAX_COUNTS:
            raise ValueError(f"a wait for {n} counts: expected at most 2**40")
        if waiting.handle is not None:
            raise RuntimeError("the wait was already queued")
        waiting.handle = self
        Py_INCREF(waiting)
        with nogil:
            lock(self.engine)
            self.engine.waits += 1
            # The counter stays while the wait may give counts back to it.
            self.counter.handles += 1
            enqueue(self.counter, &waiting.wait, n * UNITS, &self.engine.state.done)
            kick(self.engine)
            unlock(self.engine)

    def begin(self, n, bint checked=False) -> CounterWait | None:
        """Make and queue a wait in one step. Return None, without any effect, if something needs a closer look.

        `checked`: the caller has checked that this is the engine's own event loop.
        """
        cdef CounterWait waiting
        if type(n) is not int or not 0 <= n <= MAX_COUNTS or self.counter == NULL or self.core.closing:
            return None
        if not alive(self.engine):
            return None
        if not checked and self.own_loop is not None and not self.own_loop.is_running():
            return None
        waiting = CounterWait.__new__(CounterWait)
        self.wait(waiting, n)
        if not self.core.awake and self.core.on_submit is not None:
            self.core.on_submit()
        return waiting

    def close(self, bint discard=False) -> None:
        """Give the handle up; with `discard`, and no other handle, drop its counts, too. Idempotent.

        Pending waits go on, and counts are kept until the last of those is over.
        """
        cdef Counter* counter = self.counter
        self.counter = NULL
        if counter == NULL or not alive(self.engine):
            return
        with nogil:
            lock(self.engine)
            counter.handles -= 1
            counter.opened -= 1
            if discard and counter.opened == 0:
                counter.dropped = True
                if counter.head == NULL:
                    counter.units = 0
            drop_if_empty(&self.engine.state.counters, counter)
            unlock(self.engine)

    def __dealloc__(self):
        # Waits for a round at most, because a thread that holds the lock never waits for the GIL.
        if self.counter != NULL and alive(self.engine):
            with nogil:
                lock(self.engine)
                self.counter.handles -= 1
                self.counter.opened -= 1
                drop_if_empty(&self.engine.state.counters, self.counter)
                unlock(self.engine)


cdef class CounterWait(Waitable):
    """A wait for n counts."""

    def __cinit__(self):
        memset(&self.wait, 0, sizeof(self.wait))
        self.wait.done.owner = <PyObject*> self

    @property
    def satisfied(self) -> bool:
        """Whether the counts were consumed for this wait."""
        return self.wait.state == WAIT_SATISFIED

    def take(self) -> None:
        """Record that the caller has seen the counts: they are gone for good."""
        cdef Progress* engine
        if self.wait.state != WAIT_SATISFIED or not alive(self.handle.engine):
            return
        engine = self.handle.engine
        with nogil:
            lock(engine)
            self.wait.state = WAIT_OVER
            self.wait.counter.handles -= 1
            drop_if_empty(&engine.state.counters, self.wait.counter)
            unlock(engine)

    def cancel(self) -> None:
        """Withdraw the wait. Counts that were consumed for it, and not taken, are given back."""
        cdef Progress* engine
        cdef bint pending
        if self.handle is None or self.wait.state == WAIT_OVER or not alive(self.handle.engine):
            return
        engine = self.handle.engine
        with nogil:
            lock(engine)
            pending = self.wait.state == WAIT_PENDING
            self.wait.counter.handles -= 1
            withdraw(&engine.state.counters, &self.wait, &engine.state.done)
            kick(engine)
            unlock(engine)
        if pending:
            finish(self)

    cdef int resolved(self) except -1:
        self.handle.engine.waits -= 1
        return 0


cdef int start_watch(object core, Progress* engine, ValueWatch watch, object old) except -1:
    usable(engine)
    if watch.engine != NULL:
        raise RuntimeError("the watch was already started")
    watch.core = core
    watch.engine = engine
    watch.watched.old = old
    Py_INCREF(watch)
    with nogil:
        lock(engine)
        watch_link(engine, &watch.watched)
        engine.tick_ns = 0
        kick(engine)
        unlock(engine)
    return 0


cdef class ValueWatch(Waitable):
    """A value of 1, 2, 4 or 8 bytes in this process's memory, watched until it changes."""

    def __cinit__(self):
        memset(&self.watched, 0, sizeof(self.watched))
        self.watched.done.owner = <PyObject*> self
        self.engine = NULL

    def __init__(self, AcquiredBuffer buffer):
        """Keep the value's buffer. Raises ValueError for other widths and for an address that is not aligned."""
        if buffer.nbytes not in (1, 2, 4, 8):
            raise ValueError(f"a watched value has {buffer.nbytes} bytes, expected 1, 2, 4 or 8")
        if buffer.address % buffer.nbytes:
            raise ValueError("the watched value is not aligned to its size: place it at a multiple of its length")
        self.buffer = buffer
        self.watched.address = <const void*> buffer.address
        self.watched.width = <int> buffer.nbytes

    @property
    def new(self) -> int:
        """The new value that was seen."""
        return self.watched.new

    def cancel(self) -> None:
        """Stop watching the value."""
        cdef bint linked
        if self.engine == NULL or not alive(self.engine):
            return
        with nogil:
            lock(self.engine)
            linked = self.watched.linked
            watch_unlink(self.engine, &self.watched)
            unlock(self.engine)
        if linked:
            finish(self)


def read_value(AcquiredBuffer buffer) -> int:
    """Read an unsigned integer in the machine's byte order. Raises ValueError for a released buffer."""
    if buffer.nbytes == 0:
        raise ValueError("the value's buffer was released")
    return int.from_bytes((<const char*> buffer.address)[:buffer.nbytes], sys.byteorder)


# Counts of immediates in a row, waited for together: one call opens them, and one wake-up may cover several.
#
# Waiting for each by itself costs four calls (to open it, to begin, to take the counts and to close), for every layer
# of every small prompt.


cdef class CountRow:
    """Waits for `needs[i]` counts of immediate `first` + i. Counts from before are dropped if no other handle has the
    immediate open. Raises OverflowError at the limit of immediates in use, ValueError for those of over 28 bits, and
    TypeError for needs that are no numbers of writes.
    """

    def __init__(self, Core core not None, uint32_t first, needs):
        cdef CounterHandle handle
        cdef CounterWait waiting
        usable(&core.engine)
        if self.handles is not None:
            raise RuntimeError("the row was already opened")
        self.handles = []
        self.waits = []
        try:
            for need in needs:
                if not isinstance(need, int) or not 0 <= need <= MAX_COUNTS:
                    raise TypeError(f"{need!r}: expected numbers of writes to wait for, integers from 0 to 2**40")
                handle = open_counter(core, &core.engine, first + <uint32_t> len(self.handles))
                self.handles.append(handle)
                with nogil:
                    lock(&core.engine)
                    if handle.counter.opened == 1 and handle.counter.head == NULL:
                        handle.counter.units = 0
                    unlock(&core.engine)
                waiting = CounterWait.__new__(CounterWait)
                handle.wait(waiting, need)
                self.waits.append(waiting)
        except BaseException:
            self.close()
            raise
        if not core.awake and core.on_submit is not None:
            core.on_submit()

    def __len__(self):
        return len(self.waits)

    cdef int look(self) except -1:
        cdef CounterWait waiting
        while self.reached < len(self.waits):
            waiting = <CounterWait> self.waits[self.reached]
            if waiting.wait.state != WAIT_SATISFIED:
                break
            waiting.take()
            self.reached += 1
        return 0

    def advance(self) -> int:
        """Return how many waits, from the first on, have all their counts, which are consumed for good."""
        self.look()
        return self.reached

    def latest(self, int count) -> CounterWait | None:
        """Return the last of the first `count` waits that is still pending; `None` if all are over.

        A task that sleeps on that wait is not woken for each of those before it.
        """
        cdef int i
        for i in range(min(count, <int> len(self.waits)) - 1, self.reached - 1, -1):
            if (<CounterWait> self.waits[i]).wait.state == WAIT_PENDING:
                return <CounterWait> self.waits[i]
        return None

    def progress(self) -> tuple[int, int]:
        """Return how many waits are over, and how many counts have come for the others: every arrival changes it."""
        cdef CounterHandle handle
        cdef int over = 0
        cdef uint64_t units = 0
        for i in range(len(self.waits)):
            over += (<CounterWait> self.waits[i]).wait.state != WAIT_PENDING
        for handle in self.handles:
            units += handle.value
        return over, units

    def close(self) -> None:
        """End the waits that are pending, and drop the counts that were not consumed. Idempotent."""
        cdef CounterWait waiting
        cdef CounterHandle handle
        for waiting in self.waits:
            waiting.cancel()
        for handle in self.handles:
            handle.close(discard=True)


# Ranges of immediates that only named peers may count on: the Python objects of `table.pyx`.


cdef SourceRange open_range(object core, Progress* engine, uint32_t first, uint32_t count):
    cdef SourceRange made = SourceRange.__new__(SourceRange)
    cdef bint added
    usable(engine)
    made.range.first, made.range.end = first, first + count
    with nogil:
        lock(engine)
        added = add_range(&engine.state.counters, &made.range)
        unlock(engine)
    if not added:
        raise MemoryError
    made.core, made.engine = core, engine
    return made


@cython.no_gc_clear  # a cleared range would have lost the core whose table has a pointer to it
cdef class SourceRange:
    """Consecutive immediates that count only if an allowed peer sends them; at first no peer is allowed."""

    def allow(self, PeerLink link not None) -> None:
        """Count a peer's immediates from now on, until it is lost; does nothing for a lost peer. Raises ValueError for
        a peer of another engine.
        """
        cdef bint added = True
        if self.engine == NULL or link.closed or not alive(self.engine):
            return
        if link.engine != self.engine:
            raise ValueError("the peer belongs to another engine")
        with nogil:
            lock(self.engine)
            added = add_peer(&self.range, &link.state)
            unlock(self.engine)
        if not added:
            raise MemoryError

    def close(self) -> None:
        """End the restriction: from now on, immediates of any peer count on these values. Idempotent."""
        self.leave()

    def __dealloc__(self):
        self.leave()
        free(self.range.peers)

    cdef void leave(self) noexcept:
        """Take the range out of the engine's table; a closed engine has no table."""
        cdef Progress* engine = self.engine
        self.engine = NULL
        if engine != NULL and alive(engine):
            with nogil:
                lock(engine)
                remove_range(&engine.state.counters, &self.range)
                unlock(engine)
