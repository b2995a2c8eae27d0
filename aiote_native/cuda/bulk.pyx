"""Copy whole arrays between the host and a GPU, in the calling thread: a call returns when its copy is over."""

from libc.stdint cimport uint64_t

from aiote_native.cuda.driver cimport NOT_READY, checked, cuda, enter, leave, retain
from aiote_native.cuda.driver import device_of

cdef extern from *:
    """
    #include <time.h>
    static void aiote_pause(long ns) { struct timespec time = {0, ns}; nanosleep(&time, NULL); }
    """
    void aiote_pause(long) noexcept nogil

cdef enum:
    DISABLE_TIMING = 2  # CU_EVENT_DISABLE_TIMING
    LEGACY = 1          # CU_STREAM_LEGACY, the default stream
    PAUSE_NS = 50_000


cdef int ask(void* context, void* event) noexcept nogil:
    """Query an event in a context; return 0 if it is over, NOT_READY, or the driver's code."""
    cdef int mode
    cdef int code = enter(context, &mode)
    if code == 0:
        code = cuda.event_query(event)
        leave(mode)
    return code


cdef int begin(void* context, uint64_t to, uint64_t source, size_t nbytes, void** event) noexcept nogil:
    """Post the copy to the legacy default stream, and an event behind it; return 0 or the driver's code."""
    cdef int mode
    cdef int code = enter(context, &mode)
    if code:
        return code
    code = cuda.event_create(event, DISABLE_TIMING)
    if code == 0:
        # A copy to pageable memory returns when it is over, a copy from it when that memory has been read.
        code = cuda.copy(to, source, nbytes, <void*> LEGACY)
    if code == 0 and cuda.event_record(event[0], <void*> LEGACY):
        # The copy is in flight and its end must be seen, so repeat the call: its failure may be transient.
        code = cuda.event_record(event[0], <void*> LEGACY)
    leave(mode)
    return code


cdef int await_end(void* context, void* event) noexcept nogil:
    """Wait until the copy is over or the context is broken; return 0 or the driver's code.

    A broken context fails two queries in a row, while a transient failure does not repeat.
    """
    cdef int code = NOT_READY
    while code == NOT_READY:
        aiote_pause(PAUSE_NS)
        code = ask(context, event)
        if code and code != NOT_READY:
            code = ask(context, event)
    return code


def copy_bytes(uint64_t to, uint64_t source, size_t nbytes, uint64_t gpu) -> None:
    """Copy `nbytes` bytes on the default stream of a GPU, so behind the kernels that this stream already has.

    `gpu` is any address in that GPU's memory, as is `to` or `source`. Waits for the end without the GIL; the caller
    keeps both memories until then.
    Raises StatusError.
    """
    cdef int device = device_of(gpu)
    cdef bint primary = False
    cdef void* context = retain(device, gpu, &primary)
    cdef void* event = NULL
    cdef int code
    try:
        with nogil:
            code = begin(context, to, source, nbytes, &event)
            if code == 0:
                code = await_end(context, event)
        if event != NULL:
            cuda.event_destroy(event)
        checked(code, "cuMemcpyAsync")
    finally:
        if primary:
            cuda.primary_release(device)
