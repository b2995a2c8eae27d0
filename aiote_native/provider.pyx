"""What every kind of rail has in common: an opened NIC, memory registered with it, and an endpoint for one peer.

What is above (regions, peers) knows these alone; libfabric's and the simulated ones are subclasses. Whatever was
opened is closed when its object goes, whether or not its constructor came to an end: each class does that in
`__dealloc__`, and is not cleared by the collector before that, so that it still has its device then.
"""

from libc.errno cimport EOPNOTSUPP
from libc.stdint cimport uint64_t

from aiote_native.forks cimport fork_epoch
from aiote_native.status cimport check
from aiote_native.structs cimport MAY_ALL

cdef enum:
    # Bytes of one channel on their way at once: enough to fill any wire (a microsecond of 400 Gb/s is 50 KB), and so
    # few that a cancelled transfer has left the NIC within milliseconds, over tcp at 2 GiB/s too.
    WINDOW = 4 << 20


cdef class NativeDevice:
    """An opened NIC; `children` counts what is open on it. `pins`: registering takes as long as the kernel takes to pin
    the pages. Of such a kind, `register` and the registration's `close` may be called from any thread, at any time
    before the close of the NIC, and have the GIL only before and after that. `stages`: memory of a GPU is reached
    through pinned memory of the host; `shares`: or opened by peers on this host.
    """

    def register(self, uint64_t address, size_t length, bint writable=True, int access=MAY_ALL) -> Registration:
        """Register memory; `access` says what it opens to peers. The caller keeps it alive until that is closed."""
        raise NotImplementedError

    def register_dmabuf(self, int fd, uint64_t offset, size_t length, uint64_t address,
                        bint writable=True, int access=MAY_ALL) -> Registration:
        """Register a part of a DMA-BUF, which peers address from `address` on. The descriptor may be closed after it.

        Raises StatusError: EOPNOTSUPP where the kind of rail, its library, the kernel or the NIC cannot do it.
        """
        check(-EOPNOTSUPP, "register a DMA-BUF")

    def register_gpu(self, uint64_t address, size_t length, bint writable=True, int access=MAY_ALL) -> Registration:
        """Register memory of a CUDA device, where the kind `stages`. Raises StatusError."""
        check(-EOPNOTSUPP, "register GPU memory")

    @property
    def served(self) -> int | None:
        """How many bytes peers have read here, or written; None where the NIC does that and tells nobody."""
        return None

    @property
    def async_fd(self) -> int:
        """The descriptor that is readable when there are `events`; -1 where there never are any."""
        return -1

    def events(self) -> list[tuple[str, int]]:
        """Take what happened to the NIC or its queues, as (what, number of the queue, or 0)."""
        return []

    def close(self) -> None:
        """Close the NIC; everything under it must be closed before. Idempotent."""
        raise NotImplementedError


cdef class Registration:
    """Memory that a NIC knows: `key` and `base` (the address of its first byte) are for peers; `ordinal` is that
    of the GPU that it was found on, -1 where nobody has asked; `unshared` says of memory of a GPU why peers cannot
    open it, and is empty where they can.
    """

    def __cinit__(self):
        self.ordinal = -1

    def bind(self, bytes holder) -> None:
        """Have the key serve one peer alone, by its name; nothing where the kind of rail knows no names of peers."""

    @property
    def failure(self) -> str:
        """The driver's error that keeps the memory from being copied; empty for sound memory."""
        return ""

    def retire(self) -> bool:
        """Refuse the key from here on, and tell whether something still copies from or to the memory; `close` waits."""
        return False

    def flush_behind(self, address: int) -> None:
        """Have what a NIC writes flushed to the GPU of memory at an address, before it is counted."""
        raise NotImplementedError

    def close(self) -> None:
        """End the registration: the key is refused from here on. Idempotent."""
        raise NotImplementedError


cdef class NativeEndpoint:
    """An endpoint for one peer: its address travels, the peer's is set by `connect`. `forgets`: its close drops what
    its completion queue still holds.
    """

    def __cinit__(self):
        # What the peer maps, and hands its own for; -1 where there is nothing.
        self.wait_fd = self.memory_fd = -1
        self.max_sge = 1
        self.window = WINDOW

    def connect(self, bytes address) -> None:
        """Name the one peer endpoint that this one talks to."""
        raise NotImplementedError

    def name(self, bytes peer) -> None:
        """Say whose the other end is, for memory that is bound to a peer."""

    def take(self, int memory_fd) -> None:
        """Map what the peer has sent for the endpoint to reach it by; the descriptor is closed."""
        raise NotImplementedError

    def owns(self, int queue) -> bool:
        """Whether a queue of that number, as events name them, is one of the endpoint's."""
        return False

    def moved(self) -> int:
        """Return how many bytes its connection has moved either way; -1 where nobody can tell."""
        return -1

    cdef void** impl_slot(self) noexcept:
        """Where the native half stands that is not handed to a channel yet; a kind has to say."""
        return NULL

    cdef NativeDevice device_of(self):
        """The device that it was opened on; a kind has to say."""
        raise NotImplementedError

    cdef void* release_to_channel(self) except NULL:
        """Hand the endpoint to a channel, which releases it."""
        cdef void** held = self.impl_slot()
        cdef void* impl = held[0]
        if impl == NULL:
            raise RuntimeError("the endpoint is closed or owned by a channel already")
        held[0] = NULL
        return impl

    cdef void channel_closed(self):
        """Note that the channel released what was handed to it."""
        cdef NativeDevice home = self.device_of()
        home.children -= 1

    def close(self) -> None:
        """Close what is not handed to a channel. Idempotent; nothing in a child of a fork."""
        self.drop(self.device_of())

    cdef void drop(self, NativeDevice home) noexcept:
        """Close; what a kind's own `__dealloc__` calls, too, for one that nobody has closed."""
        cdef void** held = self.impl_slot()
        if held[0] != NULL and home is not None and home.epoch == fork_epoch():
            self.ops.release(held[0])
            held[0] = NULL
            home.children -= 1
