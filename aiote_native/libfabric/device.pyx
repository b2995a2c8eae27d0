"""An opened NIC: the fabric and the domain of libfabric, and the memory registered with it."""

cimport cython
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memset, strdup

import os

from aiote_native.forks cimport check_process, fork_epoch
from aiote_native.libfabric.fabric cimport (
    FI_AV_TABLE, FI_BUS_PCI, FI_CONTEXT, FI_CONTEXT2, FI_EP_RDM, FI_ENOKEY, FI_LINK_DOWN, FI_MR_ALLOCATED,
    FI_MR_ENDPOINT,
    FI_MR_LOCAL, FI_MR_PROV_KEY, FI_MR_RMA_EVENT, FI_MR_VIRT_ADDR, FI_MSG, FI_READ, FI_RECV, FI_REMOTE_READ,
    FI_REMOTE_WRITE, FI_RMA, FI_RX_CQ_DATA, FI_SEND, FI_SOCKADDR_IN, FI_SOURCE, FI_THREAD_DOMAIN, FI_THREAD_SAFE,
    FI_VERSION, FI_WRITE,
    fi_av_attr, fi_av_open, fi_close, fi_domain, fi_info, fi_mr_desc, fi_mr_key, fi_mr_reg)
from aiote_native.libfabric.library cimport symbols
from aiote_native.status cimport check
from aiote_native.structs cimport MAY_ALL, MAY_READ, MAY_WRITE


cdef tuple PINNING = ("efa", "cxi", "verbs")


cdef bint pins(str provider) except -1:
    """Return whether registering memory makes the kernel pin it, with this provider or the core provider under it."""
    return provider.partition(";")[0] in PINNING


cdef bint is_efa(str provider) noexcept:
    return provider.partition(";")[0] == "efa"


cdef void ask_efa(fi_info* hints) noexcept:
    """Ask for direct access to the NIC, with a posted receive for each immediate, so that no immediate is lost."""
    hints.mode |= FI_RX_CQ_DATA
    hints.fabric_attr.name = strdup(b"efa-direct")


cdef uint32_t api_of(bint direct) except? 0:
    """Return the API version to ask for: 1.17; for EFA's own fabric the needed 1.20, or that of an older library."""
    cdef uint32_t newest = symbols().version()
    return min(newest, FI_VERSION(1, 20)) if direct else FI_VERSION(1, 17)


cdef fi_info* query(str provider, str node, str domain, bint direct) except? NULL:
    """Ask for reliable datagram endpoints with messages and one-sided operations; return NULL if there are none.

    `direct` asks for EFA's NICs in the way that aiote uses them. Raises StatusError.
    """
    cdef fi_info* found = NULL
    cdef fi_info* hints = symbols().dupinfo(NULL)
    cdef bytes encoded_node = node.encode()
    if hints == NULL:
        raise MemoryError
    try:
        hints.caps = FI_MSG | FI_RMA
        hints.mode = FI_CONTEXT | FI_CONTEXT2
        hints.ep_attr.type = FI_EP_RDM
        hints.domain_attr.mr_mode = (FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT
                                     | FI_MR_RMA_EVENT)
        # The engine's lock guards posting and polling. If registering takes long, the engine does not hold its lock
        # meanwhile, so the provider needs locks of its own. Other providers get none: with its own locks, the tcp of
        # libfabric 2.5 takes two of them in one order to open an endpoint and in the other order to poll
        # (ThreadSanitizer). The data that its domain shares has a lock in either mode.
        hints.domain_attr.threading = FI_THREAD_SAFE if pins(provider) else FI_THREAD_DOMAIN
        if provider:
            hints.fabric_attr.prov_name = strdup(provider.encode())
        if provider.startswith("tcp") or provider.startswith("verbs"):
            hints.addr_format = FI_SOCKADDR_IN
        if domain:
            hints.domain_attr.name = strdup(domain.encode())
        if direct:
            ask_efa(hints)
        elif is_efa(provider):
            hints.caps = FI_MSG
        code = symbols().getinfo(api_of(direct), <const char*> encoded_node if node else NULL, NULL,
                                 FI_SOURCE if node else 0, hints, &found)
    finally:
        symbols().freeinfo(hints)
    if code == -61 or code == -19:  # -FI_ENODATA, -FI_ENODEV: there is no fitting device
        return NULL
    check(code, "fi_getinfo")
    return found


cdef dict summary(fi_info* info):
    cdef uint8_t* raw = <uint8_t*> info.src_addr
    cdef dict out = {
        "provider": info.fabric_attr.prov_name.decode(),
        "provider_version": info.fabric_attr.prov_version,
        "fabric": info.fabric_attr.name.decode() if info.fabric_attr.name != NULL else "",
        "domain": info.domain_attr.name.decode(),
        "protocol": info.ep_attr.protocol,
        "protocol_version": info.ep_attr.protocol_version,
        "largest": info.ep_attr.max_msg_size,
        "depth": info.tx_attr.size,
        "virtual_addresses": bool(info.domain_attr.mr_mode & FI_MR_VIRT_ADDR),
        "provider_keys": bool(info.domain_attr.mr_mode & FI_MR_PROV_KEY),
        "endpoint_memory": bool(info.domain_attr.mr_mode & FI_MR_ENDPOINT),
        "immediate_bytes": info.domain_attr.cq_data_size,
        "receives_for_immediates": bool(info.mode & FI_RX_CQ_DATA),
        "endpoints": info.domain_attr.ep_cnt,
        "source": raw[:info.src_addrlen] if raw != NULL else b"",
        "speed": 0, "pci": "", "up": True,
    }
    if info.nic != NULL and info.nic.link_attr != NULL:
        out["speed"] = info.nic.link_attr.speed
        out["up"] = info.nic.link_attr.state != FI_LINK_DOWN
    if info.nic != NULL and info.nic.bus_attr != NULL and info.nic.bus_attr.bus_type == FI_BUS_PCI:
        pci = info.nic.bus_attr.attr.pci
        out["pci"] = f"{pci.domain_id:04x}:{pci.bus_id:02x}:{pci.device_id:02x}.{pci.function_id:x}"
    return out


def discover(str provider, str node="", str domain="", *, bint usable=True) -> list[dict]:
    """List what libfabric offers for a provider, narrowed to a local address (`node`) or a domain's name.

    The order is the provider's own; the same domain may come several times, once for each address. Unless `usable`, the
    list includes EFA's NICs that aiote cannot use. Raises StatusError.
    """
    cdef fi_info* head = query(provider, node, domain, usable and is_efa(provider))
    cdef fi_info* item = head
    found = []
    try:
        while item != NULL:
            found.append(summary(item))
            item = item.next
    finally:
        if head != NULL:
            symbols().freeinfo(head)
    return found


cdef class LibfabricDevice(NativeDevice):
    """An opened fabric and domain. Endpoints are made on it, and memory is registered with it."""

    def __cinit__(self):
        self.info = NULL
        self.fabric = NULL
        self.domain = NULL
        self.av = NULL
        memset(&self.quirks, 0, sizeof(self.quirks))

    def __init__(self, str provider, str node="", str domain=""):
        """Open the first device that fits. Raises StatusError, and LookupError if there is no such device."""
        if self.info != NULL:
            raise RuntimeError("this device is open already")
        self.epoch = fork_epoch()
        self.pins = pins(provider)
        self.info = query(provider, node, domain, is_efa(provider))
        if self.info == NULL:
            raise LookupError(f"libfabric has no device for provider={provider!r} node={node!r} domain={domain!r}")
        try:
            check(symbols().fabric(self.info.fabric_attr, &self.fabric, NULL), "fi_fabric")
            check(fi_domain(self.fabric, self.info, &self.domain, NULL), "fi_domain")
            self.read_quirks()
        except BaseException:
            self.close()
            raise

    cdef int read_quirks(self) except -1:
        cdef fi_av_attr attr
        if not is_efa(self.info.fabric_attr.prov_name.decode()):
            return 0
        self.quirks.receives_for_immediates = bool(self.info.mode & FI_RX_CQ_DATA)
        self.quirks.forgets = self.quirks.shared_av = True
        self.quirks.message_limit = self.info.ep_attr.max_msg_size
        if self.info.nic != NULL and self.info.nic.link_attr != NULL and self.info.nic.link_attr.mtu:
            # `max_msg_size` is the limit of writes; the limit of messages is the MTU.
            self.quirks.message_limit = self.info.nic.link_attr.mtu
        # All endpoints share one address vector, because each takes megabytes, even if it is made for few addresses.
        memset(&attr, 0, sizeof(attr))
        attr.type = FI_AV_TABLE
        return check(fi_av_open(self.domain, &attr, &self.av, NULL), "fi_av_open")

    @property
    def attributes(self) -> dict:
        """The provider's description of the device, as in `discover`. Raises RuntimeError if the device is closed."""
        if self.info == NULL:
            raise RuntimeError("the device is closed")
        return summary(self.info)

    @property
    def closed(self) -> bool:
        return self.domain == NULL

    def register(self, uint64_t address, size_t length, bint writable=True, int access=MAY_ALL) -> FabricMemory:
        """Register `length` bytes at `address`; `access` (MAY_READ, MAY_WRITE) is what a random key allows to peers.

        The caller keeps the memory alive until the registration is closed. Raises StatusError.
        """
        return FabricMemory(self, address, length, writable, access)

    def close(self) -> None:
        """Close the domain and the fabric. Raises RuntimeError while something on them is open, and StatusError.

        Idempotent; does nothing in the child of a fork, because the parent owns them.
        """
        if self.epoch != fork_epoch():
            return
        if self.domain != NULL:
            if self.children:
                raise RuntimeError(f"{self.children} objects of this device are still open")
            if self.av != NULL:
                check(fi_close(&self.av.fid), "fi_close(av)")
                self.av = NULL
            check(fi_close(&self.domain.fid), "fi_close(domain)")
            self.domain = NULL
        if self.fabric != NULL:
            check(fi_close(&self.fabric.fid), "fi_close(fabric)")
            self.fabric = NULL
        if self.info != NULL:
            symbols().freeinfo(self.info)
            self.info = NULL

    def __dealloc__(self):
        if self.epoch != fork_epoch() or self.children:
            return
        if self.av != NULL:
            fi_close(&self.av.fid)
        if self.domain != NULL:
            fi_close(&self.domain.fid)
        if self.fabric != NULL:
            fi_close(&self.fabric.fid)
        if self.info != NULL:
            symbols().freeinfo(self.info)


@cython.no_gc_clear
cdef class FabricMemory(NicRegistration):
    """A memory registration: a key for peers, and a descriptor for this side's own operations."""

    def __cinit__(self):
        self.mr = NULL

    def __init__(self, LibfabricDevice device, uint64_t address, size_t length, bint writable, int access):
        cdef uint64_t flags = FI_SEND | FI_WRITE
        cdef uint64_t wanted = 0
        cdef uint64_t mask = 0xFFFFFFFFFFFFFFFFULL
        cdef int code = -FI_ENOKEY
        cdef fid_domain* domain = device.domain
        check_process(device.epoch)
        if device.domain == NULL:
            raise RuntimeError("the device is closed")
        if device.info.domain_attr.mr_mode & FI_MR_ENDPOINT:
            provider = device.info.fabric_attr.prov_name.decode()
            raise NotImplementedError(f"provider {provider} binds memory to endpoints, which is not supported")
        flags |= (FI_RECV | FI_READ) if writable else 0
        flags |= FI_REMOTE_READ if access & MAY_READ else 0
        flags |= FI_REMOTE_WRITE if writable and access & MAY_WRITE else 0
        if device.info.domain_attr.mr_key_size < 8:
            mask = (1ULL << (8 * device.info.domain_attr.mr_key_size)) - 1
        self.device = device
        # Counted before the GIL is released, so that the domain cannot be closed during the call.
        device.children += 1
        try:
            # If aiote chooses the keys, they are random, so that peers cannot guess them; a key in use is drawn again.
            for _attempt in range(8):
                wanted = int.from_bytes(os.urandom(8), "little") & mask
                with nogil:
                    code = fi_mr_reg(domain, <const void*> address, length, flags, 0, wanted, 0, &self.mr, NULL)
                if code != -FI_ENOKEY:
                    break
            check(code, "fi_mr_reg")
        except BaseException:
            device.children -= 1
            raise
        self.desc = fi_mr_desc(self.mr)
        self.key = fi_mr_key(self.mr)
        self.base = address if device.info.domain_attr.mr_mode & FI_MR_VIRT_ADDR else 0
        self.length = length

    def close(self) -> None:
        """End the registration; the NIC refuses its key from here on. Raises StatusError.

        Idempotent; does nothing in the child of a fork.
        """
        cdef fid_mr* mr = self.mr
        cdef int code
        if mr == NULL or self.device.epoch != fork_epoch():
            return
        self.mr = NULL
        with nogil:
            code = fi_close(&mr.fid)
        if code != 0:
            self.mr = mr
        check(code, "fi_close(mr)")
        self.desc = NULL
        self.device.children -= 1

    def __dealloc__(self):
        if self.mr != NULL and self.device is not None and self.device.epoch == fork_epoch():
            fi_close(&self.mr.fid)
            self.device.children -= 1
