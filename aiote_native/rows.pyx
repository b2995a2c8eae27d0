"""Counts of immediates in a row, waited for together: one call opens them, and one wake-up may cover several.

Waiting for each by itself costs four calls (to open it, to begin, to take the counts and to close), for every layer of
every small prompt.
"""

from libc.stdint cimport uint32_t, uint64_t

from aiote_native.core cimport Core
from aiote_native.counters cimport WAIT_PENDING, WAIT_SATISFIED
from aiote_native.progress cimport lock, unlock, usable
from aiote_native.waits cimport CounterHandle, CounterWait, open_counter


cdef object MAX_COUNTS = 1 << 40


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
            handle.close(True)
