"""Points in the streams of callers who lend GPU memory: a transfer starts after the work that a stream already has.

The engine records an event in the stream when a transfer is submitted, and queries the event until it is done. No call
blocks in the driver, and the user's stream has no more to do than to pass the event. The engine records no event in a
stream whose work is being captured: the event would become a part of the graph, and querying it would break the graph.
"""

cimport cython
from libc.errno cimport EIO
from libc.stdint cimport uint64_t

from aiote_native.cuda.driver cimport NOT_READY, cuda, described, enter, leave, retain
from aiote_native.forks cimport check_process, fork_epoch

cdef enum:
    DISABLE_TIMING = 2     # CU_EVENT_DISABLE_TIMING
    INVALID_VALUE = 1
    INVALID_CONTEXT = 201
    INVALID_HANDLE = 400
    DESTROYED = 709        # CUDA_ERROR_CONTEXT_IS_DESTROYED
    CAPTURE_FIRST = 900    # from CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
    CAPTURE_LAST = 908     # to CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD

cdef str CAPTURED = (
    "a CUDA graph is being captured on the stream, or on one that it waits for: in a graph let a kernel change an "
    "aiote.gpu.WatchedValue, and start the transfer when engine.watch sees that; or give stream=-1 for memory that is "
    "ready now"
)


cdef int hold_state(Hold* self) noexcept nogil:
    """Return 1 if all points are passed, 0 if not yet, -EIO if they cannot be passed any more."""
    cdef StreamPoint* point
    cdef int code, mode
    while self.first < self.count and self.error == 0:
        point = &self.points[self.first]
        if not point.passed:
            code = enter(point.context, &mode)
            if code == 0:
                code = cuda.event_query(point.event)
                leave(mode)
            if code == NOT_READY:
                return 0
            self.error = code
            point.passed = code == 0
        self.first += point.passed
    return -EIO if self.error else 1


@cython.no_gc_clear
cdef class EventPool:
    """A pool of events of one device's context, for transfers that wait for its streams."""

    def __cinit__(self):
        self.spare = []

    def __init__(self, int device, uint64_t address):
        """Open a pool for the device that has memory at `address`. Raises StatusError."""
        if self.opened:
            raise RuntimeError("this pool is open already")
        self.context = retain(device, address, &self.primary)
        self.device = device
        self.epoch = fork_epoch()
        self.opened = True

    @property
    def spare_events(self) -> int:
        """How many events of the pool are unused."""
        return len(self.spare)

    cdef int take(self, void** event) except -1:
        """Take an event, or create one in the current context; return 0 or the driver's code."""
        if self.spare:
            event[0] = <void*> <uint64_t> self.spare.pop()
            return 0
        return cuda.event_create(event, DISABLE_TIMING)

    cdef int record(self, uint64_t stream, StreamPoint* point) except -1:
        """Record in `point` where a stream is now; return 0, or the driver's code without recording a point.

        Raises ValueError for a stream that is being captured, is not this device's or was destroyed, and if the pool is
        closed.
        """
        cdef int mode, captures = 0
        cdef int code
        check_process(self.epoch)
        if not self.opened:
            raise ValueError("the engine is closed")
        code = enter(self.context, &mode)
        if code:
            return code
        code = cuda.stream_is_capturing(<void*> stream, &captures)
        if code == 0 and captures == 0:
            code = self.take(&point.event)
            if code == 0:
                code = cuda.event_record(point.event, <void*> stream)
                if code:
                    self.give(point.event)
        leave(mode)
        if captures or CAPTURE_FIRST <= code <= CAPTURE_LAST:
            raise ValueError(CAPTURED)
        if code in (INVALID_VALUE, INVALID_CONTEXT, INVALID_HANDLE, DESTROYED):
            raise ValueError(
                f"stream {stream:#x} does not belong to cuda:{self.device}, where the memory is, or was destroyed "
                f"({described(code)})")
        if code:
            return code
        point.context = self.context
        point.stream = <void*> stream
        point.passed = False
        return 0

    cdef void give(self, void* event) noexcept:
        """Give an event back, even if it is not done, because recording it again replaces its earlier state."""
        if self.opened:
            self.spare.append(<uint64_t> event)

    def close(self) -> None:
        """Destroy the events that were given back. Idempotent; does nothing in the child of a fork."""
        cdef int mode
        if not self.opened or self.epoch != fork_epoch():
            return
        self.opened = False
        # Errors are ignored: if the driver is closed or the context is broken, the events were freed with it.
        if enter(self.context, &mode) == 0:
            for event in self.spare:
                cuda.event_destroy(<void*> <uint64_t> event)
            leave(mode)
        self.spare.clear()
        if self.primary:
            cuda.primary_release(self.device)
