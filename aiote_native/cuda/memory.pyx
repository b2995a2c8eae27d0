"""Memory of a GPU: allocated here, exported to other processes, and opened from them."""

cimport cython
from cpython.buffer cimport PyBUF_FORMAT, PyBUF_ND, PyBUF_STRIDES
from cpython.object cimport PyObject
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_New
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.errno cimport ENOMEM, ENOSYS, errno
from libc.stdint cimport int64_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memcpy
from posix.unistd cimport close

import os

from aiote_native.cuda.descriptors cimport BATCH, AioteRequest, aiote_ask, aiote_meet, aiote_named_socket
from aiote_native.cuda.driver cimport checked, cuda, described, enter, free_pinned, leave, release_primary, symbol
from aiote_native.system.base cimport check_process, fork_epoch
from aiote_native.system.base import StatusError

# Memory that aiote allocates: a value that the host and kernels see, and memory of a device.
#
# Both are lent through the CUDA Array Interface and DLPack; a lent tensor keeps its object alive. Each object retains
# the primary context of its device. This creates the context if there is none, which is intended, because the caller
# asked for memory of that device.

cdef extern from *:
    """
    static uint64_t aiote_value(const void* value) { return __atomic_load_n((const uint64_t*)value, __ATOMIC_ACQUIRE); }
    static void aiote_set_value(void* value, uint64_t to) { __atomic_store_n((uint64_t*)value, to, __ATOMIC_RELEASE); }
    """
    uint64_t aiote_value(const void*) noexcept nogil
    void aiote_set_value(void*, uint64_t) noexcept nogil

cdef enum:
    DL_CUDA = 2
    DL_INT = 0
    DL_UINT = 1
    PORTABLE_MAPPED = 3   # CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP
    VALUE_BYTES = 8
    BLOCK = 2 << 20       # the driver puts smaller allocations into blocks of this size, together with others

cdef char* VALUE_FORMAT = b"Q"
cdef Py_ssize_t value_items = 1
cdef Py_ssize_t value_stride = VALUE_BYTES


cdef void end_lent(Lent* lent) noexcept:
    cdef PyObject* owner = lent.owner
    free(lent)
    Py_DECREF(<object> owner)


# The consumer of a tensor may delete it in any thread, so the deleters take the GIL.
cdef void delete_old(DLManagedTensor* tensor) noexcept with gil:
    end_lent(<Lent*> tensor.manager_ctx)


cdef void delete_versioned(DLManagedTensorVersioned* tensor) noexcept with gil:
    end_lent(<Lent*> tensor.manager_ctx)


cdef void drop_capsule(object capsule) noexcept:
    """Free the tensor of a capsule, unless a consumer has taken it."""
    if PyCapsule_IsValid(capsule, "dltensor"):
        delete_old(<DLManagedTensor*> PyCapsule_GetPointer(capsule, "dltensor"))
    elif PyCapsule_IsValid(capsule, "dltensor_versioned"):
        delete_versioned(<DLManagedTensorVersioned*> PyCapsule_GetPointer(capsule, "dltensor_versioned"))


@cython.no_gc
cdef class Owned:
    """Memory of a device, or memory that a device sees. A base class; its subclasses allocate the memory."""

    def __dealloc__(self):
        self.release()

    def hold(self, int device) -> None:
        """Retain the primary context of a device. Raises StatusError, and RuntimeError if one is retained already."""
        if self.retained:
            raise RuntimeError("the memory is allocated already")
        checked(cuda.primary_retain(&self.context, device), "cuDevicePrimaryCtxRetain")
        self.ordinal = device
        self.epoch = fork_epoch()
        self.retained = True

    @property
    def closed(self) -> bool:
        return self.address == 0

    @property
    def interface(self) -> dict[str, object]:
        """The CUDA Array Interface. Raises ValueError if the memory was freed.

        Device memory is an array of bytes. A value is one int64, because every library has that type.
        """
        if self.address == 0:
            raise ValueError("the memory was freed")
        bytes_alone = isinstance(self, DeviceMemory)
        shape = (self.nbytes if bytes_alone else 1,)
        kind = "|u1" if bytes_alone else "<i8"
        return {"version": 3, "shape": shape, "typestr": kind, "data": (self.address, False), "strides": None,
                "stream": None}

    def capsule(self, bint versioned) -> object:
        """Return a DLPack capsule, which keeps this object alive. Raises BufferError if the memory was freed."""
        cdef Lent* lent
        cdef DLDataType kind
        cdef bint bytes_alone = isinstance(self, DeviceMemory)
        kind.code = DL_UINT if bytes_alone else DL_INT
        kind.bits = 8 if bytes_alone else 64
        kind.lanes = 1
        if self.address == 0:
            raise BufferError("the memory was freed")
        lent = self.lent(kind, self.nbytes if bytes_alone else 1)
        if versioned:
            return PyCapsule_New(&lent.versioned, "dltensor_versioned", drop_capsule)
        return PyCapsule_New(&lent.old, "dltensor", drop_capsule)

    cdef Lent* lent(self, DLDataType kind, int64_t count) except NULL:
        cdef Lent* lent = <Lent*> calloc(1, sizeof(Lent))
        if lent == NULL:
            raise MemoryError
        lent.length = count
        lent.old.dl_tensor.data = <void*> self.address
        lent.old.dl_tensor.device.device_type = DL_CUDA
        lent.old.dl_tensor.device.device_id = self.ordinal
        lent.old.dl_tensor.ndim = 1
        lent.old.dl_tensor.dtype = kind
        lent.old.dl_tensor.shape = &lent.length
        lent.owner = <PyObject*> self
        lent.old.manager_ctx = lent
        lent.old.deleter = delete_old
        lent.versioned.version.major = 1
        lent.versioned.manager_ctx = lent
        lent.versioned.deleter = delete_versioned
        lent.versioned.dl_tensor = lent.old.dl_tensor
        Py_INCREF(self)
        return lent

    def close(self) -> None:
        """Free the memory, which no kernel may use any more. Idempotent; does nothing in the child of a fork."""
        self.release()

    cdef void free_memory(self) noexcept:
        pass

    cdef void release(self) noexcept:
        cdef int mode
        if not self.retained or self.epoch != fork_epoch():
            return
        self.retained = False
        # Errors are ignored: if the driver is closed or the context is broken, the memory was freed with it. A failed
        # call is repeated, because the failure may be transient.
        if enter(self.context, &mode) == 0 or enter(self.context, &mode) == 0:
            self.free_memory()
            leave(mode)
        self.address = 0
        release_primary(self.ordinal)


@cython.no_gc
cdef class PinnedValue(Owned):
    """Eight bytes of pinned memory. A device sees them at `address`; the host gets them through the buffer protocol."""

    def __init__(self, int device):
        """Allocate the memory, with value 0. Raises StatusError; deleting the object then frees everything."""
        cdef int mode
        self.hold(device)
        checked(enter(self.context, &mode), "cuCtxPushCurrent")
        try:
            checked(cuda.host_alloc(&self.pages, VALUE_BYTES, PORTABLE_MAPPED), "cuMemHostAlloc")
            aiote_set_value(self.pages, 0)
            checked(cuda.host_address(&self.address, self.pages, 0), "cuMemHostGetDevicePointer")
        finally:
            leave(mode)
        self.nbytes = VALUE_BYTES

    @property
    def value(self) -> int:
        """The value as the host sees it now."""
        self.require_open()
        return aiote_value(self.pages)

    @value.setter
    def value(self, uint64_t value):
        self.require_open()
        aiote_set_value(self.pages, value)

    def require_open(self) -> None:
        check_process(self.epoch)
        if self.address == 0:
            raise ValueError("the memory was freed")

    def close(self) -> None:
        """Free the memory, which no kernel may use any more. Raises BufferError while a view of the value is in use."""
        if self.exports:
            raise BufferError(f"{self.exports} views of the value are in use")
        self.release()

    cdef void free_memory(self) noexcept:
        free_pinned(self.pages)
        self.pages = NULL

    def __getbuffer__(self, Py_buffer* view, int flags):
        if self.address == 0:
            raise BufferError("the memory was freed")
        view.obj = self
        view.buf = self.pages
        view.len = view.itemsize = VALUE_BYTES
        view.readonly = 0
        view.ndim = 1
        view.format = VALUE_FORMAT if flags & PyBUF_FORMAT else <char*> NULL
        view.shape = &value_items if flags & PyBUF_ND else <Py_ssize_t*> NULL
        view.strides = &value_stride if (flags & PyBUF_STRIDES) == PyBUF_STRIDES else <Py_ssize_t*> NULL
        view.suboffsets = NULL
        view.internal = NULL
        self.exports += 1

    def __releasebuffer__(self, Py_buffer* view):
        self.exports -= 1


@cython.no_gc
cdef class DeviceMemory(Owned):
    """Memory of a device, in blocks that it shares with no other allocation."""

    def __init__(self, int device, uint64_t nbytes):
        """Allocate `nbytes` uninitialised bytes. Raises ValueError for 0 or too many, and StatusError.

        After a failure, deleting the object frees everything.
        """
        cdef int mode
        cdef uint64_t size = (nbytes + BLOCK - 1) // BLOCK * BLOCK
        if size < nbytes or nbytes == 0:
            raise ValueError(f"{nbytes} bytes cannot be allocated")
        self.hold(device)
        checked(enter(self.context, &mode), "cuCtxPushCurrent")
        try:
            checked(cuda.allocate(&self.address, size), "cuMemAlloc")
        finally:
            leave(mode)
        self.nbytes = nbytes

    cdef void free_memory(self) noexcept:
        if self.address != 0 and cuda.free(self.address):
            cuda.free(self.address)


# Export GPU memory to other processes of this host, and open their exports (memory.pxd).

cdef extern from * nogil:
    """
    #include <pthread.h>
    #include <sys/socket.h>
    typedef struct { char reserved[64]; } AioteIpcHandle;
    static pthread_mutex_t aiote_own_lock = PTHREAD_MUTEX_INITIALIZER;
    #define aiote_state(p) __atomic_load_n((p), __ATOMIC_ACQUIRE)
    #define aiote_set_state(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)
    """
    ctypedef struct AioteIpcHandle:
        char reserved[64]
    ctypedef struct pthread_mutex_t:
        pass
    pthread_mutex_t aiote_own_lock
    int pthread_mutex_lock(pthread_mutex_t*)
    int pthread_mutex_unlock(pthread_mutex_t*)
    int aiote_state(const int*)
    void aiote_set_state(int*, int)
    int pthread_create(pthread_t*, const void*, void* (*)(void*) noexcept nogil, void*)
    int pthread_join(pthread_t, void**)
    int shutdown(int, int)
    const int SHUT_RDWR

cdef enum:
    BUFFER_ID = 7            # CU_POINTER_ATTRIBUTE_BUFFER_ID
    LAZY_PEER_ACCESS = 1     # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    NO_THREAD = 2            # CUDA_ERROR_OUT_OF_MEMORY

# In the order of the names in `find_functions`. A driver that lacks one of them shares no memory.
cdef struct IpcFunctions:
    int (*address_range)(uint64_t* base, size_t* size, uint64_t address) noexcept nogil
    int (*get_handle)(AioteIpcHandle* handle, uint64_t address) noexcept nogil
    int (*open_handle)(uint64_t* address, AioteIpcHandle handle, unsigned int flags) noexcept nogil
    int (*close_handle)(uint64_t address) noexcept nogil

cdef IpcFunctions ipc
cdef bint ipc_found = False
cdef Export* own_exports = NULL


cdef str find_functions():
    """Find the driver's functions; return the name of a missing function, or an empty string."""
    global ipc_found
    cdef void** function = <void**> &ipc
    cdef bytes name
    if ipc_found:
        return ""
    names = (b"cuMemGetAddressRange_v2", b"cuIpcGetMemHandle", b"cuIpcOpenMemHandle_v2", b"cuIpcCloseMemHandle")
    for name in names:
        function[0] = symbol(name)
        if function[0] == NULL:
            return name.decode()
        function += 1
    ipc_found = True
    find_segment_functions()
    return ""


cdef int address_range(uint64_t* base, size_t* size, uint64_t address) noexcept nogil:
    """Find the allocation, or the single segment, that an address lies in; return 0 or the driver's code."""
    return ipc.address_range(base, size, address)


cdef str whole_allocation(uint64_t address, size_t length, Export* made):
    """Get the handle of the allocation that some memory lies in; return an empty string, or why there is no handle.

    Raises StatusError if the driver does not know the memory.
    """
    cdef AioteIpcHandle handle
    cdef size_t size = 0
    cdef int code
    checked(ipc.address_range(&made.base, &size, address), "cuMemGetAddressRange")
    if length > size - (address - made.base):
        return "it spans several allocations, but a handle of cuIpcGetMemHandle covers one"
    checked(cuda.pointer_attribute(&made.buffer, BUFFER_ID, made.base), "cuPointerGetAttribute(BUFFER_ID)")
    code = ipc.get_handle(&handle, made.base)
    if code:
        return f"cuIpcGetMemHandle: {described(code)}"
    made.handle.size = size
    memcpy(made.handle.bytes, &handle, HANDLE_BYTES)
    return ""


cdef int export_memory(void* context, uint64_t address, size_t length, Export* made) except -1:
    """Fill in an export of the allocation or the segments that some memory lies in.

    For segments, the caller has to fill in the name of the socket. Raises StatusError if other processes cannot open
    the memory.
    """
    cdef bytes token = os.urandom(TOKEN_BYTES)
    cdef int mode
    missing = "" if ipc_found else find_functions()
    if missing:
        raise StatusError(ENOSYS, "share GPU memory", f"the driver has no {missing}")
    checked(enter(context, &mode), "cuCtxPushCurrent")
    try:
        reason = whole_allocation(address, length, made)
        if reason:
            try:
                list_segments(address, length, made)
            except StatusError as error:
                reason = f"{reason}; {error.operation}: {error.strerror}"
                raise StatusError(ENOSYS, "share GPU memory", reason) from None
    finally:
        leave(mode)
    made.context = context
    memcpy(made.handle.token, <const char*> token, TOKEN_BYTES)
    return 0


cdef void publish(Export* made) noexcept nogil:
    """Enter an export in the list in which other engines of this process find it."""
    global own_exports
    pthread_mutex_lock(&aiote_own_lock)
    made.next_own = own_exports
    own_exports = made
    pthread_mutex_unlock(&aiote_own_lock)


cdef void withdraw(Export* made) noexcept nogil:
    global own_exports
    cdef Export** link = &own_exports
    pthread_mutex_lock(&aiote_own_lock)
    while link[0] != NULL and link[0] != made:
        link = &link[0].next_own
    if link[0] != NULL:
        link[0] = made.next_own
    pthread_mutex_unlock(&aiote_own_lock)


cdef bint is_own(Import* self) noexcept nogil:
    """Return whether this process made the export, and take its address and size from there.

    A peer's own statements about it are not trusted.
    """
    cdef Export* made
    pthread_mutex_lock(&aiote_own_lock)
    made = own_exports
    while made != NULL and memcmp(made.handle.token, self.handle.token, TOKEN_BYTES):
        made = made.next_own
    if made != NULL:
        self.address = made.base
        self.handle.size = made.handle.size
    pthread_mutex_unlock(&aiote_own_lock)
    return made != NULL


cdef int open_whole(Import* self) noexcept nogil:
    """Open an allocation by the driver's handle; return 0, or an error code."""
    cdef AioteIpcHandle handle
    cdef uint64_t base = 0
    cdef size_t size = 0
    cdef int code
    memcpy(&handle, self.handle.bytes, HANDLE_BYTES)
    code = ipc.open_handle(&self.address, handle, LAZY_PEER_ACCESS)
    # Check the size that the driver tells, because a peer may claim more.
    if code == 0 and (ipc.address_range(&base, &size, self.address) or base != self.address
                      or size < self.handle.size):
        ipc.close_handle(self.address)
        code = 1
    return code


cdef void* run_open(void* argument) noexcept nogil:
    cdef Import* self = <Import*> argument
    cdef int mode
    cdef int code = enter(self.gpu.back.context, &mode) if ipc_found else -ENOSYS
    if code == 0:
        code = map_segments(self) if self.handle.segments else open_whole(self)
        leave(mode)
    self.code = code
    aiote_set_state(&self.state, FAILED if code else OPEN)
    return NULL


cdef void* run_close(void* argument) noexcept nogil:
    cdef Import* self = <Import*> argument
    cdef int mode
    # Errors are ignored: a broken context has lost its mappings anyway. A failed call is repeated, because the failure
    # may be transient.
    if enter(self.gpu.back.context, &mode) == 0:
        if self.handle.segments:
            unmap_segments(self)
        elif ipc.close_handle(self.address):
            ipc.close_handle(self.address)
        leave(mode)
    aiote_set_state(&self.state, CLOSED)
    return NULL


cdef void begin(Import* self, int state, void* (*run)(void*) noexcept nogil) noexcept nogil:
    aiote_set_state(&self.state, state)
    self.threaded = pthread_create(&self.thread, NULL, run, self) == 0
    if not self.threaded and state == OPENING:
        self.code = NO_THREAD
        aiote_set_state(&self.state, FAILED)
    elif not self.threaded:
        run(self)


cdef void import_open(Import* self) noexcept nogil:
    """Begin to open an import; `import_state` tells when it is open or has failed."""
    self.own = is_own(self)
    self.socket = -1
    if not self.own and self.handle.segments:
        # The socket is made here, not in the thread, because shutting the channel uses it to wake the thread.
        self.socket = aiote_named_socket()
        self.code = -errno if self.socket < 0 else 0
    if self.own:
        aiote_set_state(&self.state, OPEN)
    elif self.code:
        aiote_set_state(&self.state, FAILED)
    else:
        begin(self, OPENING, run_open)


cdef void import_close(Import* self) noexcept nogil:
    """Begin to close an open import. No copy from it may be in flight."""
    if self.own:
        aiote_set_state(&self.state, CLOSED)
    else:
        begin(self, CLOSING, run_close)


cdef void join(Import* self) noexcept nogil:
    pthread_join(self.thread, NULL)
    self.threaded = False
    if self.socket >= 0:
        close(self.socket)
        self.socket = -1


cdef int import_state(Import* self) noexcept nogil:
    """Return the state of an import; join its thread if that has finished."""
    cdef int state = aiote_state(&self.state)
    if self.threaded and state != OPENING and state != CLOSING:
        join(self)
    return state


cdef bint import_lives(Import* self) noexcept nogil:
    """Return whether an import still exists: an export of this process may have ended while a peer kept its token."""
    return not self.own or is_own(self)


cdef void import_end(Import* self) noexcept nogil:
    """Wait for the thread of an import, and close the import if it is open. No copy from it may be in flight."""
    if self.threaded:
        if self.socket >= 0:
            # Do not wait for the peer, which may be stopped.
            shutdown(self.socket, SHUT_RDWR)
        join(self)
    if aiote_state(&self.state) == OPEN and not self.own:
        run_close(self)


# Sharing memory of `cuMemCreate` between processes: one file descriptor for each segment, mapped side by side.
#
# Torch with expandable segments has one segment for each 2 or 20 MiB, so a tensor may lie in thousands of them. The
# owner makes descriptors when a peer asks for them, and closes them when they are sent, because all of them together
# could exceed the number of files that a process may have open.

cdef enum:
    POSIX_DESCRIPTOR = 1     # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    ALLOWED_HANDLES = 14     # CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES
    ON_DEVICE = 1            # CU_MEM_LOCATION_TYPE_DEVICE
    READ_AND_WRITE = 3       # CU_MEM_ACCESS_FLAGS_PROT_READWRITE, as other libraries ask for
    INVALID = 1              # CUDA_ERROR_INVALID_VALUE

# CUmemAccessDesc
cdef struct Access:
    int kind
    int device
    int flags

# In the order of the names in `find_segment_functions`. A driver that lacks one of them shares no such memory.
cdef struct SegmentFunctions:
    int (*retain)(uint64_t* handle, void* address) noexcept nogil
    int (*give)(void* descriptor, uint64_t handle, int kind, unsigned long long flags) noexcept nogil
    int (*take)(uint64_t* handle, void* descriptor, int kind) noexcept nogil
    int (*release)(uint64_t handle) noexcept nogil
    int (*reserve)(uint64_t* address, size_t size, size_t alignment, uint64_t near,
                   unsigned long long flags) noexcept nogil
    int (*free)(uint64_t address, size_t size) noexcept nogil
    int (*map)(uint64_t address, size_t size, size_t offset, uint64_t handle, unsigned long long flags) noexcept nogil
    int (*unmap)(uint64_t address, size_t size) noexcept nogil
    int (*set_access)(uint64_t address, size_t size, const Access* access, size_t count) noexcept nogil

cdef SegmentFunctions segments
cdef bint segments_found = False


cdef bint find_segment_functions():
    """Find the driver's functions; return whether it has all of them."""
    global segments_found
    cdef void** function = <void**> &segments
    for name in (b"cuMemRetainAllocationHandle", b"cuMemExportToShareableHandle", b"cuMemImportFromShareableHandle",
                 b"cuMemRelease", b"cuMemAddressReserve", b"cuMemAddressFree", b"cuMemMap", b"cuMemUnmap",
                 b"cuMemSetAccess"):
        function[0] = symbol(name)
        if function[0] == NULL:
            return False
        function += 1
    segments_found = True
    return True


cdef int list_segments(uint64_t address, size_t length, Export* made) except -1:
    """List the segments that some memory lies in, in the current context.

    Raises StatusError if one of them cannot be shared, or if there are more than MOST_SEGMENTS.
    """
    cdef uint64_t allowed, buffer, base = 0
    cdef uint64_t end = address + length
    cdef size_t size = 0
    listed = []
    if not segments_found and not find_segment_functions():
        raise StatusError(ENOSYS, "share segments", "the driver has no cuMemExportToShareableHandle")
    made.buffer = 0
    while not listed or base + size < end:
        checked(address_range(&base, &size, base + size if listed else address), "cuMemGetAddressRange")
        allowed = buffer = 0
        checked(cuda.pointer_attribute(&allowed, ALLOWED_HANDLES, base), "cuPointerGetAttribute(ALLOWED_HANDLE_TYPES)")
        if not allowed & POSIX_DESCRIPTOR:
            raise StatusError(ENOSYS, "share segments", "it was allocated without POSIX_FILE_DESCRIPTOR handles")
        checked(cuda.pointer_attribute(&buffer, BUFFER_ID, base), "cuPointerGetAttribute(BUFFER_ID)")
        # One number identifies all segments. It changes if another segment is mapped at the same address.
        made.buffer = (made.buffer ^ buffer) * <uint64_t> 0x9E3779B97F4A7C15
        listed.append((base, size))
        if len(listed) > MOST_SEGMENTS:
            raise StatusError(ENOSYS, "share segments", f"it lies in more than {MOST_SEGMENTS} segments")
    made.parts = <Segment*> calloc(len(listed), sizeof(Segment))
    if made.parts == NULL:
        raise MemoryError
    for i, (base, size) in enumerate(listed):
        made.parts[i].address, made.parts[i].size = base, size
    made.base = made.parts[0].address
    made.handle.size = base + size - made.base
    made.handle.segments = len(listed)
    return 0


cdef void release_handle(uint64_t handle) noexcept nogil:
    """Release a handle of a segment. A failed call is repeated, because the failure may be transient."""
    if segments.release(handle):
        segments.release(handle)


cdef void export_batch(const Export* made, uint64_t first, AioteBatch* batch, int* descriptors) noexcept nogil:
    """Make the descriptors of a batch of segments, from number `first` on; `batch.code` tells of a failure."""
    cdef uint64_t handle = 0
    cdef int mode
    batch.count = 0
    batch.code = enter(made.context, &mode)
    if batch.code:
        return
    while batch.code == 0 and batch.count < BATCH and first + batch.count < made.handle.segments:
        batch.code = segments.retain(&handle, <void*> made.parts[first + batch.count].address)
        if batch.code:
            break
        batch.code = segments.give(&descriptors[batch.count], handle, POSIX_DESCRIPTOR, 0)
        release_handle(handle)
        if batch.code == 0:
            batch.sizes[batch.count] = made.parts[first + batch.count].size
            batch.count += 1
    leave(mode)


cdef int map_one(Import* self, int descriptor, uint64_t size, uint64_t at) noexcept nogil:
    """Map one segment; return 0 or the driver's code.

    If a peer states a wrong size, the driver refuses the mapping, or the sum of all sizes is wrong in the end.
    """
    cdef uint64_t handle = 0
    cdef int code
    if size == 0 or size > self.handle.size - at:
        return INVALID
    code = segments.take(&handle, <void*> <uintptr_t> descriptor, POSIX_DESCRIPTOR)
    if code:
        return code
    code = segments.map(self.address + at, size, 0, handle, 0)
    release_handle(handle)
    if code == 0:
        self.sizes[self.mapped] = size
        self.mapped += 1
    return code


cdef int map_all(Import* self) noexcept nogil:
    cdef int[BATCH] descriptors
    cdef AioteRequest request
    cdef AioteBatch batch
    cdef uint64_t at = 0
    cdef int i, count, code
    memcpy(request.token, self.handle.token, TOKEN_BYTES)
    while self.mapped < self.handle.segments:
        request.first = self.mapped
        count = aiote_ask(self.socket, &request, &batch, descriptors)
        if count <= 0:
            return count if count else batch.code if batch.code else INVALID
        code = 0 if count <= <int64_t> (self.handle.segments - self.mapped) else INVALID
        for i in range(count):
            if code == 0:
                code = map_one(self, descriptors[i], batch.sizes[i], at)
                at += batch.sizes[i]
            close(descriptors[i])
        if code:
            return code
    return 0 if at == self.handle.size else INVALID


cdef int map_segments(Import* self) noexcept nogil:
    """Map the segments whose descriptors a peer gives, in the current context.

    Return 0, or the driver's code or -errno; after a failure, all mappings are undone.
    """
    cdef Access access
    cdef int code = -ENOSYS if not segments_found else aiote_meet(self.socket, self.handle.bytes)
    if code:
        return code
    if self.handle.segments > MOST_SEGMENTS:
        return INVALID
    self.sizes = <uint64_t*> calloc(self.handle.segments, sizeof(uint64_t))
    if self.sizes == NULL:
        return -ENOMEM
    code = segments.reserve(&self.address, self.handle.size, 0, 0, 0)
    if code:
        self.address = 0
    else:
        code = map_all(self)
    if code == 0:
        access.kind, access.device, access.flags = ON_DEVICE, self.device, READ_AND_WRITE
        code = segments.set_access(self.address, self.handle.size, &access, 1)
    if code:
        unmap_segments(self)
    return code


cdef void unmap_segments(Import* self) noexcept nogil:
    """Unmap all segments, in the current context. Errors are ignored: a broken context has lost its mappings anyway.

    A failed call is repeated, because the failure may be transient.
    """
    cdef uint64_t at = 0
    cdef uint64_t i
    if self.address:
        for i in range(self.mapped):
            if segments.unmap(self.address + at, self.sizes[i]):
                segments.unmap(self.address + at, self.sizes[i])
            at += self.sizes[i]
        if segments.free(self.address, self.handle.size):
            segments.free(self.address, self.handle.size)
    self.mapped = 0
    self.address = 0
    free(self.sizes)
    self.sizes = NULL
