"""Ranges of immediates that only named peers may count on: the Python objects of `ranges.pyx`."""

cimport cython
from libc.stdint cimport uint32_t
from libc.stdlib cimport free

from aiote_native.peers cimport PeerLink
from aiote_native.progress cimport Progress, alive, lock, unlock, usable
from aiote_native.ranges cimport add_peer, add_range, remove_range


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
