"""Libibverbs, opened at run time; its devices, and the memory that is registered with them."""

cimport cython
from libc.errno cimport EIO, EOPNOTSUPP, errno
from libc.stdint cimport uintptr_t
from libc.string cimport memset, strcmp
from posix.dlfcn cimport RTLD_LOCAL, RTLD_NOW, dlclose, dlerror, dlopen

import os

from aiote_native.cuda.driver cimport release_primary, retain
from aiote_native.engine.structs cimport MAY_ALL, MAY_READ, MAY_WRITE
from aiote_native.system.base cimport check, check_process, fork_epoch
from aiote_native.verbs.ibverbs cimport (
    IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_RELAXED_ORDERING, IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_WRITE,
    IBV_EVENT_CQ_ERR, IBV_EVENT_DEVICE_FATAL, IBV_EVENT_PORT_ACTIVE, IBV_EVENT_PORT_ERR, IBV_EVENT_QP_ACCESS_ERR,
    IBV_EVENT_QP_FATAL, IBV_EVENT_QP_REQ_ERR, IBV_EVENT_SRQ_ERR, IBV_LINK_LAYER_ETHERNET, IBV_PORT_ACTIVE,
    aiote_alloc_parent, aiote_alloc_td, aiote_dealloc_td, aiote_query_port, ibv_async_event, ibv_device,
    ibv_post_srq_recv, ibv_recv_wr, ibv_srq_init_attr)
from aiote_native.cuda.driver import device_of
from aiote_native.system.base import StatusError

# libibverbs.so.1, opened with dlopen: the functions that it exports, in the symbol versions that the headers name.

cdef extern from "<dlfcn.h>" nogil:
    void* dlvsym(void* handle, const char* symbol, const char* version)

cdef enum:
    FUNCTIONS = 29  # in the table

cdef extern from * nogil:
    """
    /* In the order of Symbols. Each version is the first one of that function with today's structures. */
    static const char* const aiote_verbs_names[][2] = {
        {"ibv_get_device_list", "1.1"}, {"ibv_free_device_list", "1.1"}, {"ibv_get_device_name", "1.1"},
        {"ibv_open_device", "1.1"}, {"ibv_close_device", "1.1"}, {"ibv_query_device", "1.1"},
        {"ibv_query_port", "1.1"}, {"ibv_query_gid", "1.1"}, {"ibv_alloc_pd", "1.1"}, {"ibv_dealloc_pd", "1.1"},
        {"ibv_reg_mr", "1.1"}, {"ibv_dereg_mr", "1.1"}, {"ibv_create_comp_channel", "1.0"},
        {"ibv_destroy_comp_channel", "1.0"}, {"ibv_create_cq", "1.1"}, {"ibv_destroy_cq", "1.1"},
        {"ibv_get_cq_event", "1.1"}, {"ibv_ack_cq_events", "1.1"}, {"ibv_create_srq", "1.1"},
        {"ibv_destroy_srq", "1.1"}, {"ibv_create_qp", "1.1"}, {"ibv_modify_qp", "1.1"}, {"ibv_destroy_qp", "1.1"},
        {"ibv_get_async_event", "1.1"}, {"ibv_ack_async_event", "1.1"}, {"ibv_event_type_str", "1.1"},
        {"ibv_wc_status_str", "1.1"}, {"ibv_reg_mr_iova2", "1.8"}, {"ibv_reg_dmabuf_mr", "1.12"},
    };
    """
    const char* aiote_verbs_names[29][2]

cdef enum:
    OPTIONAL = 2  # functions at the end of the table, which an old library may lack

cdef Symbols verbs
cdef void* handle = NULL


cdef Symbols* symbols() except NULL:
    if handle == NULL:
        raise RuntimeError("libibverbs is not loaded: call load() first")
    return &verbs


cdef int failed(str operation, int code=0) except -1:
    """Raise the StatusError of a call that failed with `code`, or with errno if `code` is 0."""
    return check(-(code if code > 0 else errno if errno else EIO), operation)


def load(str path="libibverbs.so.1") -> None:
    """Open the library for the life of the process, unless it is open. Raises ImportError with the linker's reason."""
    global handle
    cdef void** function = <void**> &verbs
    cdef bytes version
    cdef int i
    if handle != NULL:
        return
    cdef void* library = dlopen(path.encode(), RTLD_NOW | RTLD_LOCAL)
    if library == NULL:
        raise ImportError((<bytes> dlerror()).decode("utf-8", "replace"))
    for i in range(FUNCTIONS):
        version = b"IBVERBS_" + aiote_verbs_names[i][1]
        function[i] = dlvsym(library, aiote_verbs_names[i][0], version)
        if function[i] == NULL and i < FUNCTIONS - OPTIONAL:
            dlclose(library)
            raise ImportError(f"{path} has no {aiote_verbs_names[i][0].decode()}@{version.decode()}: not a libibverbs "
                              "of rdma-core")
    handle = library


def event_name(int event) -> str:
    """Return the library's name of an asynchronous event."""
    return symbols().event_type_str(event).decode()


def completion_status(int status) -> str:
    """Return the library's name of the status of a work completion."""
    return symbols().wc_status_str(status).decode()


# An opened port of an RDMA device: protection domain, shared receives and the memory registered with it.
#
# Each arriving write with an immediate uses up a receive. The data queue pairs of all peers take these receives from
# one shared queue, so the queue is sized for the immediates that may arrive at a time, not for each peer. The receives
# have no memory of their own. When a batch of them is used up, a batch is posted.

SETTINGS = {
    "gid_index": 0, "pkey_index": 0, "service_level": 0, "traffic_class": 0, "mtu": 0, "timeout": 14, "retries": 6,
    "srq_depth": 2048, "messages": 20,
}
"""The default settings of a device."""

cdef dict PORT_EVENTS = {IBV_EVENT_PORT_ACTIVE: "port up", IBV_EVENT_PORT_ERR: "port down"}
cdef tuple QUEUE_EVENTS = (IBV_EVENT_QP_FATAL, IBV_EVENT_QP_REQ_ERR, IBV_EVENT_QP_ACCESS_ERR)


def devices() -> list[str]:
    """List the names of the devices that libibverbs can open."""
    cdef int count = 0
    cdef ibv_device** found = symbols().get_device_list(&count)
    cdef int i
    if found == NULL:
        failed("ibv_get_device_list")
    try:
        return [symbols().get_device_name(found[i]).decode() for i in range(count)]
    finally:
        symbols().free_device_list(found)


cdef int refill(Nic* nic) noexcept nogil:
    """Post the missing receives, batch by batch; return 0 or a negative error number."""
    cdef ibv_recv_wr* bad = NULL
    cdef int code
    while nic.missing >= nic.refill:
        code = ibv_post_srq_recv(nic.srq, &nic.chain[REFILL - nic.refill], &bad)
        if code != 0:
            return -code
        nic.missing -= nic.refill
        nic.refills += 1
    return 0


cdef class VerbsDevice(NativeDevice):
    """An opened port. Queue pairs are made on it, and memory is registered with it."""

    def __cinit__(self):
        memset(&self.nic, 0, sizeof(self.nic))
        self.pins = True

    def __init__(self, str name, int port=1, **settings):
        """Open port `port` of the device `name`; `settings` are as in SETTINGS. Raises StatusError and LookupError."""
        if self.nic.context != NULL:
            raise RuntimeError("this device is open already")
        self.epoch = fork_epoch()
        self.name = name
        self.nic.number = port
        self.nic.settings = {**SETTINGS, **settings}
        try:
            self.open()
        except BaseException:
            self.close()
            raise

    cdef int open(self) except -1:
        """Open the port; after a failure the caller calls `close` to free the part that was opened."""
        cdef Nic* nic = &self.nic
        cdef int code
        self.open_context()
        os.set_blocking(nic.context.async_fd, False)
        code = symbols().query_device(nic.context, &nic.attr)
        if code == 0:
            code = aiote_query_port(nic.context, nic.number, &nic.port, symbols().query_port)
        if code != 0:
            failed("ibv_query_port", code)
        if symbols().query_gid(nic.context, nic.number, nic.settings.gid_index, &nic.gid) != 0:
            failed("ibv_query_gid")
        nic.pd = symbols().alloc_pd(nic.context)
        if nic.pd == NULL:
            failed("ibv_alloc_pd")
        # The engine guards its queues with one lock of its own, so they do not need the driver's locks.
        nic.parent = nic.pd
        nic.td = aiote_alloc_td(nic.context)
        if nic.td != NULL:
            nic.parent = aiote_alloc_parent(nic.context, nic.pd, nic.td)
            if nic.parent == NULL:
                nic.parent = nic.pd
        return self.open_receives()

    cdef int open_context(self) except -1:
        """Open the device named `self.name`. Raises StatusError, and LookupError if there is no such device."""
        cdef int count = 0
        cdef int i
        cdef bytes name = self.name.encode()
        cdef ibv_device** found = symbols().get_device_list(&count)
        if found == NULL:
            failed("ibv_get_device_list")
        try:
            for i in range(count):
                if strcmp(symbols().get_device_name(found[i]), name) == 0:
                    self.nic.context = symbols().open_device(found[i])
                    if self.nic.context == NULL:
                        failed("ibv_open_device")
                    return 0
        finally:
            symbols().free_device_list(found)
        raise LookupError(f"libibverbs has no device {self.name!r}")

    cdef int open_receives(self) except -1:
        """Make the shared receive queue and fill it."""
        cdef Nic* nic = &self.nic
        cdef ibv_srq_init_attr attr
        cdef int i, code
        memset(&attr, 0, sizeof(attr))
        nic.receives = min(nic.settings.srq_depth, nic.attr.max_srq_wr)
        attr.attr.max_wr = nic.receives
        attr.attr.max_sge = 1
        nic.srq = symbols().create_srq(nic.pd, &attr)
        if nic.srq == NULL:
            failed("ibv_create_srq")
        nic.refill = max(min(nic.receives // 4, <uint32_t> REFILL), 1)
        nic.receives -= nic.receives % nic.refill
        for i in range(REFILL):
            memset(&nic.chain[i], 0, sizeof(ibv_recv_wr))
            nic.chain[i].next = &nic.chain[i + 1] if i + 1 < REFILL else NULL
        nic.missing = nic.receives
        code = refill(nic)
        if code != 0:
            failed("ibv_post_srq_recv", -code)
        return 0

    cdef ibv_context* opened(self) except NULL:
        check_process(self.epoch)
        if self.nic.context == NULL:
            raise RuntimeError("the device is closed")
        return self.nic.context

    @property
    def attributes(self) -> dict:
        """The attributes of the device and its port. The port is queried at each call. Raises StatusError."""
        cdef ibv_port_attr port
        cdef ibv_context* context = self.opened()
        cdef int code = aiote_query_port(context, self.nic.number, &port, symbols().query_port)
        if code != 0:
            failed("ibv_query_port", code)
        return {
            "name": self.name, "port": self.nic.number, "up": port.state == IBV_PORT_ACTIVE, "lid": port.lid,
            "ethernet": port.link_layer == IBV_LINK_LAYER_ETHERNET, "gid": bytes(self.nic.gid.raw[:16]),
            "mtu": 128 << port.active_mtu, "largest": port.max_msg_sz, "lockless": self.nic.parent != self.nic.pd,
            "receives": self.nic.receives, "refills": self.nic.refills,
            "reads": min(self.nic.attr.max_qp_rd_atom, self.nic.attr.max_qp_init_rd_atom),
        }

    @property
    def async_fd(self) -> int:
        """The file descriptor that is readable while there are `events`."""
        return self.opened().async_fd

    def events(self) -> list[tuple[str, int]]:
        """Take the asynchronous events that have come, each as (what, number of the queue pair, or 0).

        "queue failed" is about one queue pair, "queues failed" about the shared receives or a completion queue, "port
        up" and "port down" about the port, "removed" about the device. Other events need no reaction and are left out.
        """
        cdef ibv_context* context = self.opened()
        cdef ibv_async_event event
        found = []
        while symbols().get_async_event(context, &event) == 0:
            kind = event.event_type
            if kind in QUEUE_EVENTS:
                found.append(("queue failed", event.element.qp.qp_num))
            elif kind == IBV_EVENT_SRQ_ERR or kind == IBV_EVENT_CQ_ERR:
                found.append(("queues failed", 0))
            elif kind == IBV_EVENT_DEVICE_FATAL:
                found.append(("removed", 0))
            elif kind in PORT_EVENTS and event.element.port_num == self.nic.number:
                found.append((PORT_EVENTS[kind], 0))
            symbols().ack_async_event(&event)
        return found

    def register(self, uint64_t address, size_t length, bint writable=True, int access=MAY_ALL) -> VerbsMemory:
        """Register `length` bytes at `address`; `access` (MAY_READ, MAY_WRITE) is what their key allows to peers.

        The caller keeps the memory alive until the registration is closed. Raises StatusError.
        """
        return VerbsMemory(self, address, length, writable, access)

    def register_dmabuf(self, int fd, uint64_t offset, size_t length, uint64_t address,
                        bint writable=True, int access=MAY_ALL) -> VerbsMemory:
        """Register a part of a DMA-BUF, which the GPU's driver has exported; peers address it from `address` on.

        Raises StatusError: EOPNOTSUPP where the library, the kernel or the device does not support DMA-BUFs.
        """
        return VerbsMemory(self, address, length, writable, access, fd=fd, offset=offset)

    def close(self) -> None:
        """Close the device. Everything on it must be closed first. Idempotent; does nothing in the child of a fork.

        Raises RuntimeError while something is open on it, and StatusError if the driver refuses.
        """
        cdef int code
        if self.epoch != fork_epoch() or self.nic.context == NULL:
            return
        if self.children:
            raise RuntimeError(f"{self.children} objects of this device are still open")
        code = self.drop()
        if code != 0:
            failed("ibv_close_device", code)

    def __dealloc__(self):
        if self.epoch == fork_epoch() and self.nic.context != NULL and self.children == 0:
            self.drop()

    cdef int drop(self) noexcept:
        """Close everything that is open; return the code that closing the device returned."""
        cdef Nic* nic = &self.nic
        cdef int code, device
        for device in range(FLUSHED_DEVICES):
            if nic.flushes.primary[device]:
                release_primary(device)
        if nic.srq != NULL:
            symbols().destroy_srq(nic.srq)
        if nic.parent != NULL and nic.parent != nic.pd:
            symbols().dealloc_pd(nic.parent)
        if nic.td != NULL:
            aiote_dealloc_td(nic.context, nic.td)
        if nic.pd != NULL:
            symbols().dealloc_pd(nic.pd)
        code = symbols().close_device(nic.context)
        memset(nic, 0, sizeof(Nic))
        return code


@cython.no_gc_clear
cdef class VerbsMemory(NicRegistration):
    """A memory region: `key` is its remote key, `desc` holds its local key."""

    def __cinit__(self):
        self.mr = NULL
        self.flushed = -1

    def __init__(self, VerbsDevice device, uint64_t address, size_t length, bint writable, int access, *,
                 int fd=-1, uint64_t offset=0):
        cdef int flags = IBV_ACCESS_LOCAL_WRITE if writable else 0
        device.opened()
        flags |= IBV_ACCESS_REMOTE_READ if access & MAY_READ else 0
        flags |= IBV_ACCESS_REMOTE_WRITE if writable and access & MAY_WRITE else 0
        if fd >= 0 and symbols().reg_dmabuf_mr == NULL:
            failed("ibv_reg_dmabuf_mr", EOPNOTSUPP)
        self.device = device
        # Counted before the GIL is released, so that the device cannot be closed during the call.
        device.children += 1
        code = self.pin(device.nic.pd, address, length, flags, fd, offset)
        if code != 0:
            device.children -= 1
            failed("ibv_reg_dmabuf_mr" if fd >= 0 else "ibv_reg_mr", code)
        self.desc = <void*> (<uintptr_t> self.mr.lkey | (<uintptr_t> NOT_INLINE << 32 if fd >= 0 else 0))
        self.key = self.mr.rkey
        self.base = address
        self.length = length

    cdef int pin(self, ibv_pd* pd, uint64_t address, size_t length, int flags, int fd, uint64_t offset) noexcept:
        """Register without the GIL, because pinning the pages may take seconds; return 0 or an error number."""
        cdef Symbols* known = symbols()
        cdef int code = 0
        with nogil:
            if fd >= 0:
                self.mr = known.reg_dmabuf_mr(pd, offset, length, address, fd, flags)
            elif known.reg_mr_iova2 != NULL:
                # A library with this function drops optional flags that the device cannot do. Relaxed ordering is safe
                # because the engine counts immediates and does not depend on the order in which bytes arrive.
                self.mr = known.reg_mr_iova2(pd, <void*> address, length, address, flags | IBV_ACCESS_RELAXED_ORDERING)
            else:
                self.mr = known.reg_mr(pd, <void*> address, length, flags)
            if self.mr == NULL:
                code = errno or EIO
        return code

    def flush_behind(self, uint64_t address) -> None:
        """Flush everything that arrives to the GPU that has the memory at `address`, before it is counted.

        This lasts until the registration is closed. Raises StatusError.
        """
        cdef Flushes* flushes = &self.device.nic.flushes
        cdef int device = device_of(address)
        self.device.opened()
        if not 0 <= device < FLUSHED_DEVICES or self.flushed >= 0:
            raise StatusError(EOPNOTSUPP, "flush writes of a NIC", f"cuda:{device} cannot be flushed")
        if flushes.contexts[device] == NULL:
            flushes.contexts[device] = retain(device, address, &flushes.primary[device])
        self.flushed = device
        flushes.uses[device] += 1
        flushes.all_uses += 1

    cdef void unflush(self) noexcept:
        cdef Flushes* flushes = &self.device.nic.flushes
        if self.flushed >= 0:
            flushes.uses[self.flushed] -= 1
            flushes.all_uses -= 1
            self.flushed = -1

    def close(self) -> None:
        """End the registration; the NIC refuses its key from here on. Raises StatusError.

        Idempotent; does nothing in the child of a fork.
        """
        cdef Symbols* known = symbols()
        cdef ibv_mr* mr = self.mr
        cdef int code
        if mr == NULL or self.device.epoch != fork_epoch():
            return
        self.mr = NULL
        with nogil:
            code = known.dereg_mr(mr)
        if code != 0:
            self.mr = mr
            failed("ibv_dereg_mr", code)
        self.desc = NULL
        self.unflush()
        self.device.children -= 1

    def __dealloc__(self):
        if self.mr != NULL and self.device is not None and self.device.epoch == fork_epoch():
            self.unflush()
            symbols().dereg_mr(self.mr)
            self.device.children -= 1
