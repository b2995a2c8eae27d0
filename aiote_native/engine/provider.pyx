"""The base classes of a rail: an opened NIC, memory registered with it, and an endpoint for one peer.

The layers above (requests, channels) know only these classes; each provider's are subclasses. When an object goes, it
closes whatever it has opened, whether or not its constructor came to an end. Each class does that in `__dealloc__`,
and the collector does not clear it before that, so it still has its device then.
"""

from libc.errno cimport EOPNOTSUPP

from aiote_native.engine.structs cimport MAY_ALL
from aiote_native.system.base cimport check, fork_epoch

cdef enum:
    # Bytes of one channel in flight at once: enough to fill any wire (a microsecond of 400 Gb/s is 50 KB), and so few
    # that a cancelled transfer has left the NIC within milliseconds, over tcp at 2 GiB/s too.
    WINDOW = 4 << 20


cdef class NativeDevice:
    """An opened NIC. `children` counts the objects that are open on it.

    `pins`: registering takes as long as the kernel takes to pin the pages. For such a kind, any thread may call
    `register` and the registration's `close`, at any time before the NIC is closed, and both release the GIL while the
    kernel works. `stages`: memory of a GPU is reached through pinned memory of the host. `shares`: peers on this host
    open memory of a GPU instead.
    """

    def register(self, uint64_t address, size_t length, bint writable=True, int access=MAY_ALL) -> NicRegistration:
        """Register memory; the caller keeps it alive until the registration is closed. access: peers' permissions."""
        raise NotImplementedError

    def register_dmabuf(self, int fd, uint64_t offset, size_t length, uint64_t address,
                        bint writable=True, int access=MAY_ALL) -> NicRegistration:
        """Register a part of a DMA-BUF, which peers address from `address` on. The caller may close `fd` afterwards.

        Raises StatusError: EOPNOTSUPP where the kind of rail, its library, the kernel or the NIC cannot do it.
        """
        check(-EOPNOTSUPP, "register a DMA-BUF")

    def register_gpu(self, uint64_t address, size_t length, bint writable=True, int access=MAY_ALL) -> NicRegistration:
        """Register memory of a CUDA device, where the kind `stages`. Raises StatusError."""
        check(-EOPNOTSUPP, "register GPU memory")

    @property
    def served(self) -> int | None:
        """How many bytes peers have read here, or written; None where the NIC does that without telling us."""
        return None

    @property
    def async_fd(self) -> int:
        """The descriptor that is readable when there are `events`; -1 for a NIC that never has any."""
        return -1

    def events(self) -> list[tuple[str, int]]:
        """Take the events of the NIC or its queues, as (what, number of the queue, or 0)."""
        return []

    def close(self) -> None:
        """Close the NIC. Everything under it must be closed before. Idempotent."""
        raise NotImplementedError


cdef class NicRegistration:
    """Memory that a NIC knows. `key` and `base` (the address of its first byte) are for peers. `ordinal` is the number
    of the GPU that it was found on, -1 if that was not asked. `unshared` says why peers cannot open memory of a GPU,
    and is empty if they can.
    """

    def __cinit__(self):
        self.ordinal = -1

    def bind(self, bytes holder) -> None:
        """Make the key serve only the peer of that name; does nothing where the kind of rail knows no peer names."""

    @property
    def failure(self) -> str:
        """The driver's error that keeps the memory from being copied; empty for sound memory."""
        return ""

    def retire(self) -> bool:
        """Refuse the key from here on; return whether a copy from or to the memory goes on, for which `close` waits."""
        return False

    def flush_behind(self, address: int) -> None:
        """Make sure that a NIC's writes are flushed to the GPU of the memory at an address before they are counted."""
        raise NotImplementedError

    def close(self) -> None:
        """End the registration: the key is refused from here on. Idempotent."""
        raise NotImplementedError


cdef class NativeEndpoint:
    """An endpoint for one peer. Its own address travels to the peer; `connect` sets the peer's. `forgets`: closing it
    drops what its completion queue still holds.
    """

    def __cinit__(self):
        # `memory_fd` is memory that the peer maps, and in exchange for which it hands its own; -1 where there is none.
        self.wait_fd = self.memory_fd = -1
        self.max_sge = 1
        self.window = WINDOW

    def connect(self, bytes address) -> None:
        """Name the one peer endpoint that this one talks to."""
        raise NotImplementedError

    def name(self, bytes peer) -> None:
        """Set the name of the peer at the other end, for memory that is bound to a peer."""

    def take(self, int memory_fd) -> None:
        """Map the memory that the peer has sent so that the endpoint can reach it; the descriptor is closed."""
        raise NotImplementedError

    def owns(self, int queue) -> bool:
        """Return whether a queue of that number, as events name them, is one of the endpoint's."""
        return False

    def moved(self) -> int:
        """Return how many bytes its connection has moved either way; -1 where the kind of rail cannot tell."""
        return -1

    cdef void** impl_slot(self) noexcept:
        """Return where the native half is kept until it is handed to a channel; each kind overrides this."""
        return NULL

    cdef NativeDevice device_of(self):
        """Return the device that it was opened on; each kind overrides this."""
        raise NotImplementedError

    cdef void* release_to_channel(self) except NULL:
        """Hand the endpoint to a channel, which releases it. Raises RuntimeError if it was handed over or closed."""
        cdef void** held = self.impl_slot()
        cdef void* impl = held[0]
        if impl == NULL:
            raise RuntimeError("the endpoint is closed or owned by a channel already")
        held[0] = NULL
        return impl

    cdef void channel_closed(self):
        """Record that the channel has released the endpoint that was handed to it."""
        cdef NativeDevice home = self.device_of()
        home.children -= 1

    def close(self) -> None:
        """Close the endpoint, unless a channel has it. Idempotent; does nothing in a child of a fork."""
        self.drop(self.device_of())

    cdef void drop(self, NativeDevice home) noexcept:
        """Close. A kind's own `__dealloc__` calls this, too, for an endpoint that was never closed."""
        cdef void** held = self.impl_slot()
        if held[0] != NULL and home is not None and home.epoch == fork_epoch():
            self.ops.release(held[0])
            held[0] = NULL
            home.children -= 1
