"""The Python objects of a transfer, each with its native structure inside.

`LocalMemory` and `RemoteMemory` carry what rails need to know of a region, `PageIndex` is a checked copy of page
numbers, `Operation` is the transfer. An operation keeps the memories and indices that it uses alive until it is over.
"""

from cpython.buffer cimport PyBUF_FORMAT, PyBUF_C_CONTIGUOUS, PyBuffer_Release, PyObject_CheckBuffer, PyObject_GetBuffer
from cpython.exc cimport PyErr_SetObject, PyErr_WriteUnraisable
from cpython.number cimport PyNumber_Index
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset, strcmp

from aiote_native.buffers cimport AcquiredBuffer
from aiote_native.elements cimport refuse_mask
from aiote_native.provider cimport NativeDevice, NicRegistration
from aiote_native.schedule cimport NO_KEY, NO_REACH
from aiote_native.stream_orders cimport Order
from aiote_native.structs cimport MAY_ALL, MAY_WRITE
from aiote_native.waiters cimport wake


cdef class Waitable:
    """Something that will be over: then `Core.reap` wakes its `waiter` and calls `on_over(self)`, once.

    A waiter is a future of the event loop, or a list of them.
    """

    cdef int resolved(self) except -1:
        return 0


cdef int finish(Waitable item, list woken=None) except -1:
    """Report one end, once, and drop the reference that the core had. Its waiters join `woken`, or are woken here."""
    if item.is_over:
        return 0
    item.is_over = True
    waiter = item.waiter
    item.waiter = None
    # These calls are its owner's: a mistake in them must not keep this item, or others, from hearing of their ends.
    try:
        item.resolved()
        callback = item.on_over
        item.on_over = None
        if callback is not None:
            callback(item)
    except BaseException as error:
        PyErr_SetObject(type(error), error)
        PyErr_WriteUnraisable(item)
    if waiter is None:
        pass
    elif woken is None:
        wake(waiter)
    elif type(waiter) is list:
        woken.extend(waiter)
    else:
        woken.append(waiter)
    Py_DECREF(item)
    return 0


cdef class Unreached(NicRegistration):
    """Stands for memory that a rail does not reach: peers are given a key that none of them uses."""

    def __init__(self):
        self.key = NO_KEY

    def close(self) -> None:
        """Return at once, because no memory was registered."""


cdef int adopt(LocalMemory self, registrations) except -1:
    """Take over registrations that exist already, one for each rail."""
    cdef NicRegistration registration
    cdef int rail = 0
    for made in registrations:
        registration = Unreached() if made is None else made
        self.registrations += (registration,)
        self.descs[rail] = NO_REACH if made is None else registration.desc
        rail += 1
    return 0


cdef class LocalMemory:
    """Memory registered with every rail of an engine; it keeps its buffer exported until it is closed.

    `access` is what peers may do with it, of MAY_READ and MAY_WRITE. With a descriptor, `fd`, rails reach it through
    that DMA-BUF, in which it begins at `offset`. With `staged`, the kinds of rail that can stage it do so. With
    `registrations`, it takes over those, one for each rail, None for a rail that does not reach the memory.
    """

    def __init__(self, AcquiredBuffer buffer, list devices, int access=MAY_ALL, int fd=-1, uint64_t offset=0,
                 bint staged=False, registrations=None):
        cdef NicRegistration registration
        cdef NativeDevice device
        cdef int rail = 0
        if self.buffer is not None:
            raise RuntimeError("the memory is registered already")
        if len(devices) > MAX_RAILS:
            raise ValueError(f"the memory has {len(devices)} rails, but an engine drives at most {MAX_RAILS}")
        self.buffer = buffer
        self.address = buffer.address
        self.length = buffer.nbytes
        self.writable = not buffer.readonly
        self.access = access if self.writable else access & ~MAY_WRITE
        self.registrations = ()
        if registrations is not None:
            adopt(self, registrations)
            return
        try:
            for device in devices:
                if staged and device.stages:
                    registration = device.register_gpu(self.address, self.length, self.writable, access)
                elif fd >= 0:
                    registration = device.register_dmabuf(fd, offset, self.length, self.address, self.writable, access)
                else:
                    registration = device.register(self.address, self.length, self.writable, access)
                self.registrations += (registration,)
                self.descs[rail] = registration.desc
                rail += 1
        except BaseException:
            self.close()
            raise

    def bind(self, bytes holder) -> None:
        """Make the keys serve only the peer of that name, on the rails that know names of peers."""
        for registration in self.registrations:
            (<NicRegistration> registration).bind(holder)

    def rank(self, ranks) -> None:
        """Set how far each rail is from the memory: 0 for the nearest, the same for those that are equally near."""
        cdef int rail
        for rail in range(min(len(ranks), MAX_RAILS)):
            self.ranks[rail] = min(ranks[rail], MAX_RAILS - 1)
        self.ranked = len(set(ranks)) > 1

    cdef int leave(self) except -1:
        self.in_flight -= 1
        if self.in_flight == 0 and self.on_idle is not None:
            self.on_idle()
        return 0

    @property
    def keys(self) -> tuple[tuple[int, int], ...]:
        """The key and the address of the first byte, for each rail, as peers need them."""
        return tuple((registration.key, registration.base) for registration in self.registrations)

    def retire(self) -> bool:
        """Refuse the keys from here on, and return whether a copy from or to the memory goes on."""
        return any([registration.retire() for registration in self.registrations])

    def close(self) -> None:
        """Deregister and release the buffer. Idempotent; raises RuntimeError while transfers use it."""
        if self.in_flight:
            raise RuntimeError(f"{self.in_flight} transfers still use this memory")
        for registration in self.registrations:
            registration.close()
        self.registrations = ()
        if self.buffer is not None:
            self.buffer.release()


cdef class RemoteMemory:
    """A peer's memory: a key and an address for each of its rails. `lease_flight` is the flight of the requests
    through its lease, if it belongs to one.
    """

    def __init__(self, uint64_t length, bint writable, keys, uint64_t lease=0, bint readable=True):
        cdef int rail = 0
        if len(keys) > MAX_CHANNELS:
            raise ValueError(f"the remote memory has {len(keys)} keys, but a peer has at most {MAX_CHANNELS} rails")
        self.length = length
        self.writable = writable
        self.readable = readable
        self.rails = len(keys)
        self.lease = lease
        for key, base in keys:
            self.keys[rail] = key
            self.bases[rail] = base
            rail += 1


cdef class PageIndex:
    """A copy of page numbers as 64-bit integers, which later changes of the caller's list do not affect."""

    def __cinit__(self):
        self.values = NULL

    def __init__(self, indices):
        cdef uint64_t i = 0
        if self.values != NULL:
            raise RuntimeError("the page index is already filled")
        refuse_mask(indices)
        if PyObject_CheckBuffer(indices) and self.copy_buffer(indices):
            self.find_bounds()
            return
        items = indices.tolist() if hasattr(indices, "tolist") else list(indices)
        self.allocate(len(items))
        for item in items:
            self.values[i] = PyNumber_Index(item)
            i += 1
        self.find_bounds()

    cdef void find_bounds(self) noexcept:
        """Find the least and the greatest number, so that a check of the bounds need not look at all of them."""
        cdef uint64_t i
        self.least = self.most = self.values[0] if self.count else 0
        for i in range(1, self.count):
            self.least = min(self.least, self.values[i])
            self.most = max(self.most, self.values[i])

    cdef int allocate(self, uint64_t count) except -1:
        self.values = <int64_t*> malloc((count or 1) * sizeof(int64_t))
        if self.values == NULL:
            raise MemoryError
        self.count = count
        return 0

    cdef bint copy_buffer(self, object indices) except -1:
        """Copy a contiguous row of native 64-bit integers at once; return False for any other buffer."""
        cdef Py_buffer view
        try:
            PyObject_GetBuffer(indices, &view, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS)
        except (BufferError, ValueError):  # NumPy raises the second
            return False
        try:
            if view.ndim != 1 or view.itemsize != 8 or (strcmp(view.format, b"l") and strcmp(view.format, b"q")):
                return False
            self.allocate(view.len // 8)
            memcpy(self.values, view.buf, view.len)
            return True
        finally:
            PyBuffer_Release(&view)

    def __dealloc__(self):
        free(self.values)

    def __len__(self):
        return self.count

    def __getitem__(self, uint64_t i):
        if i >= self.count:
            raise IndexError(i)
        return self.values[i]

    def first_outside(self, uint64_t page_bytes, uint64_t stride, uint64_t offset, uint64_t length) -> int:
        """Return the position of the first page that leaves [0, length), or -1: page i covers page_bytes bytes from
        offset + index[i] * stride."""
        cdef uint64_t i, limit
        cdef int64_t bad = -1
        if self.count == 0:
            return -1
        if offset > length or page_bytes > length - offset:
            return 0
        # The largest index that fits. Indices are compared, never multiplied, so no product can overflow.
        limit = (length - offset - page_bytes) // stride if stride else 0xFFFFFFFFFFFFFFFFULL
        if self.least >= 0 and <uint64_t> self.most <= limit:
            return -1
        with nogil:
            for i in range(self.count):
                if self.values[i] < 0 or <uint64_t> self.values[i] > limit:
                    bad = i
                    break
        return bad


cdef int fill(Op* op, LocalMemory local, uint64_t local_offset, RemoteMemory remote, uint64_t remote_offset,
              uint64_t local_extent, uint64_t remote_extent, bint into_local) except -1:
    """Check both ranges before anything is posted, because providers fail late, hang or lie about a bad one. Raises
    ValueError.
    """
    if local is not None:
        if local_offset > local.length or local_extent > local.length - local_offset:
            raise ValueError(f"local range {local_offset}+{local_extent} leaves a region of {local.length} bytes")
        if into_local and not local.writable:
            raise ValueError("the local memory is read-only")
        op.local_address = local.address + local_offset
        op.local_desc = local.descs
        op.ranks = local.ranks if local.ranked else NULL
    if remote is not None:
        if remote_offset > remote.length or remote_extent > remote.length - remote_offset:
            raise ValueError(
                f"remote range {remote_offset}+{remote_extent} leaves a region of {remote.length} bytes")
        if not into_local and not remote.writable:
            raise ValueError("the remote memory is read-only")
        if into_local and not remote.readable:
            raise ValueError("the remote memory is write-only")
        op.remote_base = remote.bases
        op.remote_key = remote.keys
        op.remote_offset = remote_offset
    return 0


cdef class Operation(Waitable):
    """A transfer. It is made empty, handed to one of `Core.submit_*`, and is over when `is_over`."""

    def __cinit__(self):
        memset(&self.op, 0, sizeof(Op))
        self.op.done.owner = <PyObject*> self
        self.op.rail = self.op.pin = -1

    @property
    def errno(self) -> int:
        """The positive error number of the first thing that failed, or 0."""
        return -self.op.status

    @property
    def provider_errno(self) -> int:
        """The provider's own error number, where it gave one."""
        return self.op.provider_errno

    @property
    def rail(self) -> int:
        """The rail of the first failure, or of the last post; -1 where there was none."""
        return self.op.rail

    def prefer(self, int rail) -> None:
        """Use this rail only, for as long as it is there. Raises RuntimeError once the transfer was submitted."""
        if self.submitted:
            raise RuntimeError("the operation was already submitted")
        self.op.pin = rail

    @property
    def was_cancelled(self) -> bool:
        return self.op.cancelled

    @property
    def confirmed_bytes(self) -> int:
        """Bytes that are known to have arrived."""
        return self.op.confirmed

    @property
    def total_bytes(self) -> int:
        return self.op.total

    cdef int take(self, LocalMemory local, uint64_t local_offset, RemoteMemory remote, uint64_t remote_offset,
                  uint64_t local_extent, uint64_t remote_extent, bint into_local) except -1:
        if self.submitted:
            raise RuntimeError("the operation was already submitted")
        fill(&self.op, local, local_offset, remote, remote_offset, local_extent, remote_extent, into_local)
        self.local = local
        self.remote = remote
        return 0

    cdef int take_pages(self, LocalMemory local, uint64_t local_offset, PageIndex here, uint64_t local_stride,
                        RemoteMemory remote, uint64_t remote_offset, PageIndex there, uint64_t remote_stride,
                        uint64_t page_bytes, bint into_local) except -1:
        """Take pages, whose bounds the caller has checked; `kept` holds their indices until the end."""
        self.take(local, local_offset, remote, remote_offset, 0, 0, into_local)
        self.kept = (here, there)
        self.op.local_index = here.values
        self.op.local_stride = local_stride
        self.op.remote_index = there.values
        self.op.remote_stride = remote_stride
        self.op.part_bytes = page_bytes
        self.op.parts = here.count
        return 0

    cdef int resolved(self) except -1:
        cdef LocalMemory local = self.local
        self.local = None
        self.remote = None
        self.kept = None
        if self.order is not None:
            (<Order> self.order).leave()
        if local is not None and local.events is not None and self.op.status != 0:
            self.broken = next(filter(None, [made.failure for made in local.registrations]), None)
        if local is not None:
            local.leave()
        return 0
