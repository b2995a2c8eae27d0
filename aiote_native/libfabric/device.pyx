"""Libfabric, opened at run time; its domains, and the memory that is registered with them."""

cimport cython
from libc.errno cimport errno
from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memset, strdup
from posix.dlfcn cimport RTLD_LOCAL, RTLD_NOW, dlclose, dlerror, dlopen
from posix.fcntl cimport O_RDWR, open
from posix.mman cimport MAP_FAILED, MAP_SHARED, PROT_READ, PROT_WRITE, mmap, munmap
from posix.unistd cimport close

import os

from aiote_native.engine.structs cimport MAY_ALL, MAY_READ, MAY_WRITE
from aiote_native.libfabric.fabric cimport (
    FI_AV_TABLE, FI_BUS_PCI, FI_CONTEXT, FI_CONTEXT2, FI_ENOKEY, FI_EP_RDM, FI_LINK_DOWN, FI_MR_ALLOCATED,
    FI_MR_ENDPOINT, FI_MR_LOCAL, FI_MR_PROV_KEY, FI_MR_RMA_EVENT, FI_MR_VIRT_ADDR, FI_MSG, FI_READ, FI_RECV,
    FI_REMOTE_READ, FI_REMOTE_WRITE, FI_RMA, FI_RX_CQ_DATA, FI_SEND, FI_SOCKADDR_IN, FI_SOURCE, FI_THREAD_DOMAIN,
    FI_THREAD_SAFE, FI_VERSION, FI_WRITE, fi_av_attr, fi_av_open, fi_close, fi_domain, fi_info, fi_mr_desc, fi_mr_key,
    fi_mr_reg)
from aiote_native.system.base cimport check, check_process, fork_epoch, name_errors_with, strerror_function

# libfabric.so.1, opened with dlopen.
#
# The headers that this was built against (1.17) define most of the API inline over ops tables, so only six exported
# functions have to be found. They are looked up by the symbol versions of that ABI. A later library exports newer
# versions of the same names for larger structures, and its default version would read past the end of aiote's
# structures.

cdef extern from "<dlfcn.h>" nogil:
    """
    #ifndef _GNU_SOURCE
    #error "dlvsym needs _GNU_SOURCE"
    #endif
    """
    ctypedef struct Dl_info:
        const char* dli_fname
    void* dlvsym(void* handle, const char* symbol, const char* version)
    int dladdr(const void* address, Dl_info* info)

cdef extern from "<stdlib.h>" nogil:
    int setenv(const char* name, const char* value, int overwrite)


cdef Symbols table
cdef void* handle = NULL
cdef str loaded_path = ""


cdef void* find(void* library, bytes name, bytes version) except NULL:
    cdef void* symbol = dlvsym(library, name, version)
    if symbol == NULL:
        raise ImportError(f"it has no symbol {name.decode()}@{version.decode()}: not a libfabric 1.x or 2.x")
    return symbol


cdef Symbols* symbols() except NULL:
    if handle == NULL:
        raise RuntimeError("libfabric is not loaded: call load(path) first")
    return &table


cdef void set_defaults(dict defaults):
    """Set environment variables that the user has not set; libraries read them when they are opened."""
    for name, value in defaults.items():
        setenv(name.encode(), value.encode(), 0)


def probe(str path, dict defaults) -> tuple[str, int, int]:
    """Return the file that `path` resolves to and its (major, minor) version, without initialising or keeping it.

    This must not be called after libibverbs was opened: libraries that come with a libfabric register themselves there,
    and libibverbs would call them after they are unloaded. Keeping the library open instead would link the plug-ins of
    another libfabric to it.

    A bare name is searched for as the dynamic linker does; `defaults` are as in `load`. Raises ImportError with the
    linker's reason.
    """
    cdef bytes encoded = path.encode()
    set_defaults(defaults)
    cdef void* library = dlopen(encoded, RTLD_NOW | RTLD_LOCAL)
    cdef Dl_info where
    cdef void* symbol
    cdef uint32_t number
    if library == NULL:
        raise ImportError((<bytes> dlerror()).decode("utf-8", "replace"))
    try:
        symbol = find(library, b"fi_version", b"FABRIC_1.0")
        number = (<uint32_t (*)() noexcept nogil> symbol)()
        found = where.dli_fname.decode() if dladdr(symbol, &where) else path
        return found, number >> 16, number & 0xFFFF
    finally:
        dlclose(library)


def load(str path, dict defaults) -> tuple[int, int]:
    """Open the library at `path` for the life of the process and return its (major, minor) version.

    `defaults` are provider parameters (FI_*). They are set in the environment of the process unless the user has set
    them, because providers read them once, when the library initialises. Loading the same path again does nothing.
    Another path raises RuntimeError, because two copies of libfabric in one process share /dev/shm names and signal
    handlers. Raises ImportError with the linker's reason, or for a library that is not libfabric.
    """
    global handle, loaded_path
    if handle != NULL:
        if path != loaded_path:
            raise RuntimeError(f"libfabric is loaded from {loaded_path} already; load {path} in another process")
        return version()
    cdef bytes encoded = path.encode()
    set_defaults(defaults)
    cdef void* library = dlopen(encoded, RTLD_NOW | RTLD_LOCAL)
    if library == NULL:
        raise ImportError((<bytes> dlerror()).decode("utf-8", "replace"))
    try:
        table.getinfo = <getinfo_function> find(library, b"fi_getinfo", b"FABRIC_1.3")
        table.freeinfo = <void (*)(fi_info*) noexcept nogil> find(library, b"fi_freeinfo", b"FABRIC_1.3")
        table.dupinfo = <fi_info* (*)(const fi_info*) noexcept nogil> find(library, b"fi_dupinfo", b"FABRIC_1.3")
        table.fabric = <int (*)(fi_fabric_attr*, fid_fabric**, void*) noexcept nogil> (
            find(library, b"fi_fabric", b"FABRIC_1.1"))
        table.version = <uint32_t (*)() noexcept nogil> find(library, b"fi_version", b"FABRIC_1.0")
        name_errors_with(<strerror_function> find(library, b"fi_strerror", b"FABRIC_1.0"))
    except BaseException:
        dlclose(library)
        raise
    handle = library
    loaded_path = path
    return version()


def version() -> tuple[int, int]:
    """Return the loaded library's (major, minor) version."""
    cdef uint32_t number = symbols().version()
    return number >> 16, number & 0xFFFF


def path() -> str:
    """Return the path that the library was loaded from, or an empty string."""
    return loaded_path


# The spin lock and the command queue in an endpoint's shared memory, for libfabric before 2.0.
#
# The layout of `struct smr_region` in version 4 (libfabric 1.17, ofi_shm.h): a byte of version, the owner's process
# number at 4, the lock at 24, the offset of the command queue at 64. That queue (`ofi_rbuf.h`) is four words (size,
# mask, commands read, commands written) and a ring of commands of 256 bytes. This module accesses no other fields.

cdef extern from "<pthread.h>" nogil:
    ctypedef int pthread_spinlock_t
    int pthread_spin_init(pthread_spinlock_t*, int)
    int pthread_spin_unlock(pthread_spinlock_t*)
    int PTHREAD_PROCESS_SHARED

cdef enum:
    MAPPED = 4096
    VERSION = 4
    PROCESS_AT = 4
    LOCK_AT = 24
    QUEUE_AT = 64
    QUEUE_HEAD = 32
    COMMAND = 256
    MOST_COMMANDS = 65536
    # The place of the operation in a command, and the operations of ofi_proto.h that a second command follows.
    OPERATION_AT = 16
    READ = 2
    WRITE = 4
    ATOMIC = 6
    ATOMIC_COMPARE = 8

cdef enum:  # the words of a queue
    SIZE, MASK, COMMANDS_READ, COMMANDS_WRITTEN


cdef class SpinLock:
    """The lock of one endpoint's memory, found by the memory's file. It is mapped, so the file may be removed."""

    cdef uint8_t* memory
    cdef size_t mapped
    cdef uint64_t* commands  # the owner's queue; NULL if there is no queue of this layout
    cdef uint64_t size  # of the queue when it was mapped; the peer can change the queue's own word, but not this bound

    def __cinit__(self):
        self.memory = NULL
        self.commands = NULL
        self.mapped = self.size = 0

    def __init__(self, str path, int process):
        """Map the file. Raises OSError, and ValueError for memory of another layout or another process."""
        if self.memory != NULL:
            raise RuntimeError("the lock is open already")
        cdef int fd = open(path.encode(), O_RDWR)
        cdef uint64_t queue
        check(-errno if fd < 0 else 0, "open(spin lock)")
        try:
            self.map(fd, MAPPED)
            if self.memory[0] != VERSION or (<int32_t*> (self.memory + PROCESS_AT))[0] != process:
                raise ValueError(f"{path} is not the memory of process {process} in layout {VERSION}")
            queue = (<uint64_t*> (self.memory + QUEUE_AT))[0]
            if 0 < queue <= MAPPED - QUEUE_HEAD and queue % 16 == 0:
                self.size = (<uint64_t*> (self.memory + queue))[SIZE]
                if 0 < self.size <= MOST_COMMANDS and (<uint64_t*> (self.memory + queue))[MASK] == self.size - 1:
                    self.map(fd, queue + QUEUE_HEAD + self.size * COMMAND)
                    self.commands = <uint64_t*> (self.memory + queue)
        finally:
            close(fd)

    cdef int map(self, int fd, size_t length) except -1:
        """Map the first `length` bytes of the file in place of the earlier mapping."""
        cdef void* memory = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)
        if memory == MAP_FAILED:
            check(-errno, "mmap(spin lock)")
        self.unmap()
        self.memory = <uint8_t*> memory
        self.mapped = length
        return 0

    @property
    def held(self) -> bool:
        """Whether the lock is held now, by any process."""
        # The C library decides which value a free lock has: 1 on x86-64, 0 on arm64.
        cdef pthread_spinlock_t free
        pthread_spin_init(&free, PTHREAD_PROCESS_SHARED)
        return self.memory != NULL and (<int32_t*> (self.memory + LOCK_AT))[0] != <int32_t> free

    @property
    def commands_read(self) -> int:
        """How many commands the memory's owner has taken out of its queue."""
        return self.commands[COMMANDS_READ] if self.commands != NULL else 0

    def release(self) -> None:
        """Unlock the lock, whoever holds it. Call it once no other process can want the lock."""
        if self.memory != NULL:
            pthread_spin_unlock(<pthread_spinlock_t*> (self.memory + LOCK_AT))

    def drop_half(self) -> bool:
        """Take back the first of two commands if their sender ended between the two; return whether there was one.

        A write is two commands, which the sender commits one after the other while it holds the lock. The owner of the
        queue reads both without checking the count. If the second command is missing, the owner reads past the end of
        its queue, takes the ring's old contents for commands, and then never stops or crashes. Call this while the lock
        is still held by the process that has ended.
        """
        cdef uint64_t* queue = self.commands
        cdef uint64_t at, written
        if queue == NULL or not self.held:
            return False
        at, written = queue[COMMANDS_READ], queue[COMMANDS_WRITTEN]
        if written - at > self.size:
            return False
        while at < written:
            at += 1 + is_double((<uint8_t*> queue) + QUEUE_HEAD + (at & (self.size - 1)) * COMMAND)
        if at == written:
            return False
        queue[COMMANDS_WRITTEN] = written - 1
        return True

    cdef void unmap(self) noexcept:
        if self.memory != NULL:
            munmap(self.memory, self.mapped)
            self.memory = NULL

    def __dealloc__(self):
        self.unmap()


cdef bint is_double(uint8_t* command) noexcept nogil:
    """Return whether a second command follows, which names the memory that is written or read."""
    cdef uint32_t operation = (<uint32_t*> (command + OPERATION_AT))[0]
    return operation == READ or operation == WRITE or ATOMIC <= operation <= ATOMIC_COMPARE


# An opened NIC: the fabric and the domain of libfabric, and the memory registered with it.

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
