"""Queues of copies between a GPU's memory and pinned memory of the host (copies.pxd)."""

cimport cython
from libc.errno cimport EIO
from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from aiote_native.clocks cimport clock_ns
from aiote_native.cuda.driver cimport NOT_READY, checked, cuda, enter, leave, retain
from aiote_native.forks cimport check_process, fork_epoch

cdef extern from *:
    """
    #include <time.h>
    static uint32_t aiote_seen(const uint32_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
    static void aiote_nap(long ns) { struct timespec time = {0, ns}; nanosleep(&time, NULL); }
    """
    uint32_t aiote_seen(const uint32_t*) noexcept nogil
    void aiote_nap(long) noexcept nogil

cdef enum:
    NON_BLOCKING = 1          # CU_STREAM_NON_BLOCKING
    PORTABLE_MAPPED = 3       # CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP
    WORD_BYTES = 4096
    HUNG = 702                # CUDA_ERROR_LAUNCH_TIMEOUT
    NAP_NS = 20_000
    LOOK_NS = 1_000_000
    HUNG_NS = 10_000_000_000  # copies posted here take 0.2 ms, so after 10 s the GPU counts as broken


cdef uint8_t* slot_at(const CopyQueue* self, int slot) noexcept nogil:
    return self.slots + <size_t> slot * SLOT_BYTES


cdef int queue_take(CopyQueue* self) noexcept nogil:
    """Take a free slot and return its number, or -1 if all slots are in use."""
    while self.busy_count and queue_state(self, self.busy_until[self.busy_first]):
        self.free[self.free_count] = self.busy[self.busy_first]
        self.free_count += 1
        self.busy_first = (self.busy_first + 1) % SLOTS
        self.busy_count -= 1
    if self.free_count == 0:
        return -1
    self.free_count -= 1
    return self.free[self.free_count]


cdef void queue_give(CopyQueue* self, int slot) noexcept nogil:
    """Give back a slot that no copy reads. A copy may still write to it: the next copy to it is posted behind that."""
    self.free[self.free_count] = slot
    self.free_count += 1


cdef void queue_give_behind(CopyQueue* self, int slot) noexcept nogil:
    """Give back a slot that a copy of the last group reads; the slot becomes free when that group is over."""
    cdef int at = (self.busy_first + self.busy_count) % SLOTS
    self.busy[at] = slot
    self.busy_until[at] = self.posted
    self.busy_count += 1


cdef int queue_begin(CopyQueue* self) noexcept nogil:
    """Begin a group of copies; return 0, or -EIO without beginning one."""
    return -EIO if self.error or enter(self.context, &self.mode) else 0


cdef int queue_copy(CopyQueue* self, void* to, const void* source, size_t length) noexcept nogil:
    """Post one copy of the group; return 0 or -EIO. After a failure, the caller still waits for the group's end."""
    return -EIO if cuda.copy(<uint64_t> to, <uint64_t> source, length, self.stream) else 0


cdef uint32_t queue_end(CopyQueue* self) noexcept nogil:
    """End a group; return the number that the GPU writes when all copies so far are over."""
    cdef uint32_t number = self.posted + 1
    cdef int code = cuda.stream_write(self.stream, self.word_address, number, 0)
    if code:
        # The failure may be transient, so repeat the call: without the number, the end would never be seen.
        code = cuda.stream_write(self.stream, self.word_address, number, 0)
    if code:
        self.error = code
    self.posted = number
    leave(self.mode)
    return number


cdef uint32_t queue_seen(const CopyQueue* self) noexcept nogil:
    """Return the last number that the GPU has written: all copies up to it are over."""
    return aiote_seen(self.word)


cdef int queue_state(const CopyQueue* self, uint32_t number) noexcept nogil:
    """Return the state of the copies up to a number: 1: over, 0: in flight, -EIO: the device broke before their end."""
    if <int32_t> (aiote_seen(self.word) - number) >= 0:
        return 1
    return -EIO if self.error else 0


cdef int ask(CopyQueue* self) noexcept nogil:
    cdef int mode
    cdef int code = enter(self.context, &mode)
    if code == 0:
        code = cuda.stream_query(self.stream)
        leave(mode)
    return code


cdef void queue_look(CopyQueue* self) noexcept nogil:
    """While copies are in flight, find out whether the context is broken. Called before a sleep, not in each poll."""
    cdef int code = 0
    if self.error or queue_state(self, self.posted):
        return
    # A broken context fails each query, while a transient failure does not repeat.
    for _attempt in range(2):
        code = ask(self)
        if code == 0 or code == NOT_READY:
            return
    self.error = code


cdef void queue_wait(CopyQueue* self, uint32_t number) noexcept nogil:
    """Wait until the copies up to a number are over or the device is broken."""
    cdef uint64_t begun = clock_ns()
    cdef uint64_t looked = begun
    cdef uint64_t now
    while queue_state(self, number) == 0:
        aiote_nap(NAP_NS)
        now = clock_ns()
        if now - looked > LOOK_NS:
            looked = now
            queue_look(self)
        if now - begun > HUNG_NS:
            self.error = HUNG


@cython.no_gc_clear
cdef class CopyQueues:
    """The two queues of copies for one device's memory. If the device breaks, `error` is the driver's code.

    If the object is freed without `close`, its pinned memory stays allocated, because a channel that is still open may
    use its slots.
    """

    def __cinit__(self):
        self.queues = NULL

    def __init__(self, int device, uint64_t address):
        """Open both queues for the device that has memory at `address`. Raises StatusError; both are closed then."""
        cdef void* context
        if self.queues != NULL:
            raise RuntimeError("these queues are open already")
        context = retain(device, address, &self.primary)
        self.device = device
        self.epoch = fork_epoch()
        self.queues = <GpuQueues*> calloc(1, sizeof(GpuQueues))
        if self.queues == NULL:
            if self.primary:
                cuda.primary_release(device)
            raise MemoryError
        try:
            self.open_queue(&self.queues.out, context)
            self.open_queue(&self.queues.back, context)
        except BaseException:
            self.close()
            raise

    cdef int open_queue(self, CopyQueue* queue, void* context) except -1:
        cdef int mode, slot
        cdef void* pages = NULL
        queue.context = context
        checked(enter(context, &mode), "cuCtxPushCurrent")
        try:
            checked(cuda.stream_create(&queue.stream, NON_BLOCKING), "cuStreamCreate")
            checked(cuda.host_alloc(&pages, WORD_BYTES, PORTABLE_MAPPED), "cuMemHostAlloc")
            queue.word = <uint32_t*> pages
            queue.word[0] = 0
            checked(cuda.host_address(&queue.word_address, pages, 0), "cuMemHostGetDevicePointer")
            checked(cuda.host_alloc(&pages, <size_t> SLOTS * SLOT_BYTES, PORTABLE_MAPPED), "cuMemHostAlloc")
            queue.slots = <uint8_t*> pages
        finally:
            leave(mode)
        for slot in range(SLOTS):
            queue_give(queue, slot)
        return 0

    cdef void close_queue(self, CopyQueue* queue) noexcept:
        cdef int mode
        if queue.context == NULL:
            return
        if queue.word != NULL:
            with nogil:
                queue_wait(queue, queue.posted)
        # Errors are ignored: if the driver is closed or the context is broken, everything was freed with it. A failed
        # call is repeated, because the failure may be transient.
        if enter(queue.context, &mode):
            return
        if queue.stream != NULL and cuda.stream_destroy(queue.stream):
            cuda.stream_destroy(queue.stream)
        if queue.slots != NULL and cuda.host_free(queue.slots):
            cuda.host_free(queue.slots)
        if queue.word != NULL:
            cuda.host_free(queue.word)
        leave(mode)

    @property
    def error(self) -> int:
        """The driver's code if the device is broken and copies no longer proceed; 0 for a sound device."""
        return 0 if self.queues == NULL else self.queues.out.error or self.queues.back.error

    def require_sound(self) -> None:
        """Raise StatusError if the device is broken."""
        check_process(self.epoch)
        checked(self.error, "copy memory of a GPU")

    def close(self) -> None:
        """Wait for the copies and close the queues. Idempotent; does nothing in the child of a fork."""
        if self.queues == NULL or self.epoch != fork_epoch():
            return
        self.close_queue(&self.queues.out)
        self.close_queue(&self.queues.back)
        if self.primary:
            cuda.primary_release(self.device)
        free(self.queues)
        self.queues = NULL
