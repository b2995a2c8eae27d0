"""Memory that aiote allocates: a value that the host and kernels see, and memory of a device.

Both are lent through the CUDA Array Interface and DLPack; a lent tensor keeps its object alive. Each object retains the
primary context of its device. This creates the context if there is none, which is intended, because the caller asked
for memory of that device.
"""

cimport cython
from cpython.buffer cimport PyBUF_FORMAT, PyBUF_ND, PyBUF_STRIDES
from cpython.object cimport PyObject
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_New
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport calloc, free

from aiote_native.cuda.driver cimport checked, cuda, enter, leave
from aiote_native.forks cimport check_process, fork_epoch

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
        # Errors are ignored: if the driver is closed or the context is broken, the memory was freed with it.
        if enter(self.context, &mode) == 0:
            self.free_memory()
            leave(mode)
        self.address = 0
        cuda.primary_release(self.ordinal)


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
        if self.pages != NULL:
            cuda.host_free(self.pages)
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
        if self.address != 0:
            cuda.free(self.address)
