"""CUDA's driver: found at run time, and called for events, copies, flushes and dma-bufs."""

cimport cython
from libc.errno cimport EIO, ENOSYS, EOPNOTSUPP
from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from posix.dlfcn cimport RTLD_LOCAL, RTLD_NOW, dlclose, dlerror, dlopen, dlsym

from aiote_native.system.base cimport check_process, clock_ns, fork_epoch
from aiote_native.system.base import StatusError

# libcuda.so.1, opened with dlopen at the first use of GPU memory; a process without GPU memory never loads it.
#
# No call depends on the context that is current in the calling thread. Each group of calls pushes the memory's context,
# sets the thread's capture mode to relaxed, and restores both at its end. Without the context, a call from a thread of
# aiote's own ends with error 3 or 201. Without the relaxed mode, querying a stream invalidates a CUDA graph that
# another thread is capturing.

cdef enum:
    FUNCTIONS = 26
    OLDEST = 12000  # the driver of CUDA 12.0 (R525)
    RELAXED = 2     # CU_STREAM_CAPTURE_MODE_RELAXED
    POINTER_CONTEXT = 1  # CU_POINTER_ATTRIBUTE_CONTEXT
    POINTER_DEVICE = 9   # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL

cdef extern from * nogil:
    """
    /* In the order of the members of Symbols (driver.pxd), which `load` fills as an array. */
    static const char* const aiote_cuda_names[] = {
        "cuInit", "cuDriverGetVersion", "cuGetErrorName", "cuGetErrorString", "cuPointerGetAttribute",
        "cuDevicePrimaryCtxGetState", "cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease_v2",
        "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuThreadExchangeStreamCaptureMode", "cuMemHostAlloc",
        "cuMemFreeHost", "cuMemHostGetDevicePointer_v2", "cuMemcpyAsync", "cuStreamCreate", "cuStreamDestroy_v2",
        "cuStreamQuery", "cuStreamWriteValue32_v2", "cuStreamIsCapturing", "cuEventCreate", "cuEventDestroy_v2",
        "cuEventRecord", "cuEventQuery", "cuMemAlloc_v2", "cuMemFree_v2",
    };
    """
    const char* aiote_cuda_names[26]

cdef Symbols cuda
cdef bint loaded = False
cdef void* opened = NULL


def load(str path="libcuda.so.1") -> None:
    """Open the driver until the process ends; idempotent. Raises StatusError that says what is missing."""
    global cuda, loaded, opened
    cdef Symbols table
    cdef void** function = <void**> &table
    cdef int version = 0
    cdef int i
    if loaded:
        return
    cdef void* library = dlopen(path.encode(), RTLD_NOW | RTLD_LOCAL)
    if library == NULL:
        raise StatusError(ENOSYS, "open the CUDA driver", (<bytes> dlerror()).decode("utf-8", "replace"))
    for i in range(FUNCTIONS):
        function[i] = dlsym(library, aiote_cuda_names[i])
        if function[i] == NULL:
            dlclose(library)
            raise too_old(f"{path} has no {aiote_cuda_names[i].decode()}")
    cuda = table
    checked(cuda.version(&version), "cuDriverGetVersion")
    if version < OLDEST:
        raise too_old(f"{path} is the driver of CUDA {version // 1000}.{version % 1000 // 10}")
    opened = library
    checked(cuda.init(0), "cuInit")
    loaded = True


cdef object too_old(str what):
    return StatusError(ENOSYS, "open the CUDA driver", f"{what}; install the driver of CUDA 12.0 (R525) or later")


cdef void* symbol(const char* name) noexcept:
    """Return a function that not every driver has, or NULL if this driver lacks it or is not open."""
    return NULL if opened == NULL else dlsym(opened, name)


def is_loaded() -> bool:
    """Return whether the driver is open."""
    return loaded


cdef str described(int code):
    cdef const char* name = NULL
    cdef const char* text = NULL
    cuda.error_name(code, &name)
    cuda.error_text(code, &text)
    if name == NULL or text == NULL:
        return f"CUDA error {code}"
    return f"{name.decode()}: {text.decode()}"


cdef int checked(int code, str operation) except -1:
    """Raise StatusError with the driver's name of the error, if `code` is not 0."""
    if code:
        raise StatusError(EIO, operation, described(code))
    return 0


cdef int enter(void* context, int* mode) noexcept nogil:
    """Begin a group of calls in a context; return 0, or the driver's code without beginning a group."""
    cdef int code = cuda.push_context(context)
    if code == 0:
        mode[0] = RELAXED
        code = cuda.exchange_capture_mode(mode)
        if code:
            cuda.pop_context(&context)
    return code


cdef void leave(int mode) noexcept nogil:
    """End a group of calls that `enter` began. A failed call is repeated, because the failure may be transient."""
    cdef void* context = NULL
    if cuda.exchange_capture_mode(&mode):
        cuda.exchange_capture_mode(&mode)
    if cuda.pop_context(&context):
        cuda.pop_context(&context)


def error_of(int code) -> str:
    """Describe one of the driver's codes."""
    return described(code)


def device_of(uint64_t address) -> int:
    """Return the ordinal of the device whose memory is at an address. Raises StatusError if it is no GPU memory."""
    cdef int device = -1
    checked(cuda.pointer_attribute(&device, POINTER_DEVICE, address), "cuPointerGetAttribute(DEVICE_ORDINAL)")
    return device


cdef void* retain(int device, uint64_t address, bint* primary) except NULL:
    """Return the context for GPU memory: its device's primary context if that is active, else the memory's own.

    `primary` says whether it is the primary one, which is then retained until the caller releases it. An inactive
    primary context is not created, because it would take hundreds of megabytes of that GPU. Raises StatusError.
    """
    cdef void* context = NULL
    cdef unsigned int flags = 0
    cdef int active = 0
    checked(cuda.primary_state(device, &flags, &active), "cuDevicePrimaryCtxGetState")
    primary[0] = active != 0
    if active:
        checked(cuda.primary_retain(&context, device), "cuDevicePrimaryCtxRetain")
    else:
        checked(cuda.pointer_attribute(&context, POINTER_CONTEXT, address), "cuPointerGetAttribute(CONTEXT)")
    if context == NULL:
        raise StatusError(EIO, "find the context of GPU memory", "its device has no active context")
    return context


cdef void release_primary(int device) noexcept nogil:
    """Release a primary context. A failed call is repeated, because the failure may be transient."""
    if cuda.primary_release(device):
        cuda.primary_release(device)


cdef void free_pinned(void* pages) noexcept nogil:
    """Free pinned memory, in the current context. A failed call is repeated, because the failure may be transient."""
    if pages != NULL and cuda.host_free(pages):
        cuda.host_free(pages)


# Points in the streams of callers who lend GPU memory: a transfer starts after the work that a stream already has.
#
# The engine records an event in the stream when a transfer is submitted, and queries the event until it is done. No
# call blocks in the driver, and the user's stream has no more to do than to pass the event. The engine records no event
# in a stream whose work is being captured: the event would become a part of the graph, and querying it would break the
# graph.

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
        # Errors are ignored: if the driver is closed or the context is broken, the events were freed with it. A failed
        # call is repeated, because the failure may be transient.
        if enter(self.context, &mode) == 0 or enter(self.context, &mode) == 0:
            for event in self.spare:
                if cuda.event_destroy(<void*> <uint64_t> event):
                    cuda.event_destroy(<void*> <uint64_t> event)
            leave(mode)
        self.spare.clear()
        if self.primary:
            release_primary(self.device)


# Order a NIC's accesses to GPU memory: flush the NIC's writes, and make the driver's copies synchronous.
#
# A NIC's write may reach the GPU's memory after its completion has reached the host's memory. Up to Ampere, a kernel
# that is launched in between may miss the write. The driver says for each device whether that can happen
# (WRITES_ORDERING below 100), and flushes the writes that have arrived when it is asked to.

cdef enum:
    FLUSH_OPTIONS = 117     # CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS
    WRITES_ORDERING = 118   # CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING
    BY_HOST = 1             # CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST
    ORDERED = 100           # CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER
    CURRENT_CONTEXT = 0     # CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX
    TO_OWNER = 100          # CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER
    SYNC_MEMOPS = 6         # CU_POINTER_ATTRIBUTE_SYNC_MEMOPS

ctypedef int (*attribute_function)(int* value, int attribute, int device) noexcept nogil
ctypedef int (*flush_function)(int target, int scope) noexcept nogil
ctypedef int (*set_function)(const void* value, int attribute, uint64_t address) noexcept nogil

cdef flush_function flush = NULL


def needs_flush(uint64_t address) -> bool:
    """Return whether NIC writes to a GPU's memory have to be flushed before kernels see them.

    Raises StatusError if they have to be flushed but cannot be, or if the driver cannot say whether they have to.
    """
    global flush
    cdef attribute_function attribute = <attribute_function> symbol(b"cuDeviceGetAttribute")
    cdef int device = device_of(address)
    cdef int ordering = 0
    cdef int options = 0
    if attribute == NULL:
        raise StatusError(EOPNOTSUPP, "order writes of a NIC", "the driver has no cuDeviceGetAttribute")
    checked(attribute(&ordering, WRITES_ORDERING, device), "cuDeviceGetAttribute(GPU_DIRECT_RDMA_WRITES_ORDERING)")
    if ordering >= ORDERED:
        return False
    checked(attribute(&options, FLUSH_OPTIONS, device), "cuDeviceGetAttribute(GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS)")
    flush = <flush_function> symbol(b"cuFlushGPUDirectRDMAWrites")
    if flush == NULL or not options & BY_HOST:
        raise StatusError(EOPNOTSUPP, "order writes of a NIC", f"cuda:{device} neither orders nor flushes them")
    return True


def synchronize_copies(uint64_t address) -> None:
    """Make the driver's own copies to some memory synchronous, because NICs read it in no order with streams.

    The driver refuses this for segments. The refusal is ignored, because each transfer waits for its caller's stream.
    """
    cdef set_function set_attribute = <set_function> symbol(b"cuPointerSetAttribute")
    cdef unsigned int on = 1
    cdef bint primary = False
    cdef int device = device_of(address)
    cdef void* context = retain(device, address, &primary)
    cdef int mode
    if set_attribute != NULL and enter(context, &mode) == 0:
        set_attribute(&on, SYNC_MEMOPS, address)
        leave(mode)
    if primary:
        release_primary(device)


cdef int flush_writes(void* context) noexcept nogil:
    """Flush NIC writes, so that kernels launched from here on see what has arrived; return 0 or the driver's code.

    A failed call is repeated, because the failure may be transient.
    """
    cdef int mode
    cdef int code = 0
    for _attempt in range(2):
        code = enter(context, &mode)
        if code == 0:
            code = flush(CURRENT_CONTEXT, TO_OWNER)
            leave(mode)
        if code == 0:
            break
    return code


# Export a GPU's memory as a DMA-BUF, through the driver and in the memory's own context.

cdef enum:
    DMA_BUF_FD = 1  # CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD

ctypedef int (*range_function)(void* handle, uint64_t address, size_t length, int kind,
                               unsigned long long flags) noexcept nogil


def export_range(uint64_t address, size_t length) -> int:
    """Return a DMA-BUF descriptor, owned by the caller, of whole pages of GPU memory.

    Raises StatusError with the driver's name of the error.
    """
    cdef range_function function = <range_function> symbol(b"cuMemGetHandleForAddressRange")
    cdef int number = device_of(address)
    cdef bint primary = False
    cdef void* context
    cdef int mode
    cdef int code
    cdef int fd = -1
    if function == NULL:
        raise StatusError(EOPNOTSUPP, "export memory of a GPU", "the driver has no cuMemGetHandleForAddressRange")
    context = retain(number, address, &primary)
    try:
        checked(enter(context, &mode), "cuCtxPushCurrent")
        code = function(&fd, address, length, DMA_BUF_FD, 0)
        leave(mode)
    finally:
        if primary:
            release_primary(number)
    if code:
        raise StatusError(EOPNOTSUPP, "cuMemGetHandleForAddressRange", described(code))
    return fd


# Copy whole arrays between the host and a GPU, in the calling thread: a call returns when its copy is over.

cdef extern from *:
    """
    #include <time.h>
    static void aiote_pause(long ns) { struct timespec time = {0, ns}; nanosleep(&time, NULL); }
    """
    void aiote_pause(long) noexcept nogil

cdef enum:
    LEGACY = 1          # CU_STREAM_LEGACY, the default stream
    PAUSE_NS = 50_000


cdef int query(void* context, void* event) noexcept nogil:
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
        code = query(context, event)
        if code and code != NOT_READY:
            code = query(context, event)
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
        if event != NULL and cuda.event_destroy(event):
            cuda.event_destroy(event)
        checked(code, "cuMemcpyAsync")
    finally:
        if primary:
            release_primary(device)


# Queues of copies between a GPU's memory and pinned memory of the host (driver.pxd).

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
    MOST_ENTRIES = 240        # a call that posts more than 256 to one stream is said to block
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
        self.busy_first = (self.busy_first + 1) % self.slot_count
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
    cdef int at = (self.busy_first + self.busy_count) % self.slot_count
    self.busy[at] = slot
    self.busy_until[at] = self.posted
    self.busy_count += 1


cdef int queue_in_hand(const CopyQueue* self) noexcept nogil:
    """Return how many slots have been taken and not been given back."""
    return self.slot_count - self.free_count - self.busy_count


cdef bint queue_has_room(CopyQueue* self, int copies, int groups) noexcept nogil:
    """Return whether that many groups, each of at most so many copies, can be posted without blocking.

    A broken queue has room: posting to it fails at once.
    """
    cdef uint32_t seen = aiote_seen(self.word)
    while self.cleared != seen and self.cleared != self.posted:
        self.cleared += 1
        self.entries -= self.sizes[self.cleared % GROUPS]
    return self.error != 0 or self.entries + (copies + 1) * groups <= MOST_ENTRIES


cdef int queue_begin(CopyQueue* self) noexcept nogil:
    """Begin a group of copies; return 0, or -EIO without beginning one."""
    self.begun = 0
    return -EIO if self.error or enter(self.context, &self.mode) else 0


cdef int queue_copy(CopyQueue* self, void* to, const void* source, size_t length) noexcept nogil:
    """Post one copy of the group; return 0 or -EIO. After a failure, the caller still waits for the group's end."""
    self.begun += 1
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
    self.sizes[number % GROUPS] = <uint8_t> (self.begun + 1)
    self.entries += self.begun + 1
    leave(self.mode)
    return number


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

    def __init__(self, int device, uint64_t address, uint64_t nbytes):
        """Open both queues, with `nbytes` of slots each, for the device that has memory at `address`.

        Raises ValueError, and StatusError; both queues are closed then.
        """
        cdef uint64_t slot_count = nbytes // SLOT_BYTES
        cdef void* context
        if not LEAST_SLOTS <= slot_count <= MOST_SLOTS:
            raise ValueError(f"{nbytes} bytes of slots: expected {LEAST_SLOTS} to {MOST_SLOTS} slots of {SLOT_BYTES}")
        if self.queues != NULL:
            raise RuntimeError("these queues are open already")
        context = retain(device, address, &self.primary)
        self.device = device
        self.epoch = fork_epoch()
        self.queues = <GpuQueues*> calloc(1, sizeof(GpuQueues))
        if self.queues == NULL:
            if self.primary:
                release_primary(device)
            raise MemoryError
        try:
            self.open_queue(&self.queues.out, context, <int> slot_count)
            self.open_queue(&self.queues.back, context, <int> slot_count)
        except BaseException:
            self.close()
            raise

    cdef int open_queue(self, CopyQueue* queue, void* context, int slot_count) except -1:
        cdef int mode, slot
        cdef void* pages = NULL
        queue.context = context
        queue.slot_count = slot_count
        checked(enter(context, &mode), "cuCtxPushCurrent")
        try:
            checked(cuda.stream_create(&queue.stream, NON_BLOCKING), "cuStreamCreate")
            checked(cuda.host_alloc(&pages, WORD_BYTES, PORTABLE_MAPPED), "cuMemHostAlloc")
            queue.word = <uint32_t*> pages
            queue.word[0] = 0
            checked(cuda.host_address(&queue.word_address, pages, 0), "cuMemHostGetDevicePointer")
            checked(cuda.host_alloc(&pages, <size_t> slot_count * SLOT_BYTES, PORTABLE_MAPPED), "cuMemHostAlloc")
            queue.slots = <uint8_t*> pages
        finally:
            leave(mode)
        for slot in range(slot_count):
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
        if enter(queue.context, &mode) and enter(queue.context, &mode):
            return
        if queue.stream != NULL and cuda.stream_destroy(queue.stream):
            cuda.stream_destroy(queue.stream)
        free_pinned(queue.slots)
        free_pinned(queue.word)
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
            release_primary(self.device)
        free(self.queues)
        self.queues = NULL
