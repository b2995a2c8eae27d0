"""Points in the streams of whoever lends GPU memory: a transfer that is submitted goes behind what they do before it.

An event is recorded in a stream when the transfer is submitted, and asked for until it is done; nothing waits for it in
the driver, and no stream of a user's is given more to do than to pass the event. Nothing is recorded in a stream whose
work is being captured, where it would become a part of the graph, and asking would break that.
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
    """Tell whether all points are passed: 1, 0 for not yet, -EIO for never."""
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
    """Events of one device's context, for who waits for its streams."""

    def __cinit__(self):
        self.spare = []

    def __init__(self, int device, uint64_t address):
        """Open one for the device of some memory. Raises StatusError."""
        if self.opened:
            raise RuntimeError("this pool is open already")
        self.context = retain(device, address, &self.primary)
        self.device = device
        self.epoch = fork_epoch()
        self.opened = True

    @property
    def spare_events(self) -> int:
        """How many events nobody uses."""
        return len(self.spare)

    cdef int take(self, void** event) except -1:
        """Take an event; the context is the current one."""
        if self.spare:
            event[0] = <void*> <uint64_t> self.spare.pop()
            return 0
        return cuda.event_create(event, DISABLE_TIMING)

    cdef int record(self, uint64_t stream, StreamPoint* point) except -1:
        """Note where a stream is now: 0, or the driver's code and nothing was noted. Raises ValueError for a stream
        that cannot be waited for.
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
                f"stream {stream:#x} is not one of cuda:{self.device}, where the memory is, or it was destroyed "
                f"({described(code)})")
        if code:
            return code
        point.context = self.context
        point.stream = <void*> stream
        point.passed = False
        return 0

    cdef void give(self, void* event) noexcept:
        """Give an event back, whether it is done or not: recording it again forgets what it was."""
        if self.opened:
            self.spare.append(<uint64_t> event)

    def close(self) -> None:
        """Destroy the events that were given back. Idempotent; nothing in a child of a fork."""
        cdef int mode
        if not self.opened or self.epoch != fork_epoch():
            return
        self.opened = False
        # What a broken or closed driver says here is no error: the context has gone with all of it.
        if enter(self.context, &mode) == 0:
            for event in self.spare:
                cuda.event_destroy(<void*> <uint64_t> event)
            leave(mode)
        self.spare.clear()
        if self.primary:
            cuda.primary_release(self.device)
