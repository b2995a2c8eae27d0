"""Checked return codes, forks, timers, a check of the event loop, and the base classes of a rail."""

from libc.errno cimport EOPNOTSUPP, errno
from libc.stdint cimport uint64_t
from libc.string cimport memset, strerror
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec
from posix.unistd cimport close, read

from aiote_native.engine.structs cimport MAY_ALL

# The one function that checks return codes of C.
#
# Every call into a provider or the kernel that can fail goes through `check`: a negative code is -errno. Numbers from
# 256 on (FI_ERRNO_OFFSET) are libfabric's own, and its library names them; the C library names the others.

cdef strerror_function provider_strerror = NULL


cdef void name_errors_with(strerror_function function):
    """Let the provider's library name the numbers from 256 on."""
    global provider_strerror
    provider_strerror = function


class StatusError(OSError):
    """A call failed: `errno` is positive, `operation` names the call."""

    def __init__(self, errnum: int, operation: str, text: str = ""):
        super().__init__(errnum, text or describe(errnum))
        self.operation = operation

    def __str__(self):
        return f"{self.operation}: {self.strerror} (errno {self.errno})"


cdef str describe(int errnum):
    cdef const char* text = NULL
    if errnum >= 256 and provider_strerror != NULL:
        text = provider_strerror(errnum)
    elif errnum < 256:
        text = strerror(errnum)
    return text.decode("utf-8", "replace") if text != NULL else f"error {errnum}"


cdef int check(long code, str operation) except -1:
    if code < 0:
        raise StatusError(<int> -code, operation)
    return 0


def error_text(int errnum) -> str:
    """Return the text of a positive error number, libfabric's own ones included."""
    return describe(errnum)


# Forks: an object that was made before a fork belongs to the parent.
#
# A child must not call a library whose locks another thread of its parent may have held, so every object that reaches
# such a library remembers the epoch in which it was made.

# Incremented in every child of a fork.
cdef uint64_t forks = 0


def after_fork() -> None:
    """Make everything of the parent unusable in this process; to be called in the child of a fork."""
    global forks
    forks += 1


class ForkError(RuntimeError):
    """A child of a fork has used an object of its parent."""


cdef uint64_t fork_epoch() noexcept nogil:
    return forks


cdef int check_process(uint64_t epoch) except -1:
    """Raise ForkError for an object that was made before a fork."""
    if epoch != forks:
        raise ForkError("this engine belongs to the parent process: after a fork, open another one in the child")
    return 0


# Timers: the system's, or those of another clock.
#
# Where time is virtual, an engine must neither spin nor set a timer of the system's.

cdef extern from "<sys/timerfd.h>" nogil:
    struct itimerspec:
        timespec it_interval
        timespec it_value
    int timerfd_create(int, int)
    const int TFD_CLOEXEC, TFD_NONBLOCK
    int timerfd_settime(int, int, const itimerspec*, itimerspec*)


cdef uint64_t clock_ns() noexcept nogil:
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return <uint64_t> now.tv_sec * 1_000_000_000 + <uint64_t> now.tv_nsec


cdef void start_timer(const ClockOps* clock, void* context, int fd, uint64_t ns) noexcept nogil:
    """Make a timer's descriptor readable after `ns`, less than a second: by `clock`, or (NULL) by the system's timer.
    """
    cdef itimerspec when
    if clock != NULL:
        clock.alarm(context, fd, ns)
        return
    memset(&when, 0, sizeof(when))
    when.it_value.tv_nsec = ns
    timerfd_settime(fd, 0, &when, NULL)


cdef class Clock:
    """A replacement of the system's timers that a core is given. A subclass fills it in."""

    def __cinit__(self):
        self.clock_ops = NULL
        self.clock_context = NULL


cdef class NativeAlarm:
    """A timer that an event loop watches as a descriptor.

    While asyncio has timers of its own, it reads the clock three times in a turn instead of once, and each time is a
    system call where there is no vDSO.
    """

    def __cinit__(self):
        self.fd = -1

    def __init__(self):
        if self.fd >= 0:
            raise RuntimeError("the alarm is open already")
        self.fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)
        check(-errno if self.fd < 0 else 0, "timerfd_create")

    def set(self, double seconds) -> None:
        """Make the descriptor readable after `seconds`, from 1 us to 30 years; this replaces the time set before."""
        cdef itimerspec when
        cdef uint64_t ns = <uint64_t> (min(max(seconds, 1e-6), 1e9) * 1e9)
        memset(&when, 0, sizeof(when))
        when.it_value.tv_sec = ns // 1_000_000_000
        when.it_value.tv_nsec = ns % 1_000_000_000
        check(-errno if timerfd_settime(self.fd, 0, &when, NULL) else 0, "timerfd_settime")

    def clear(self) -> None:
        """Make the descriptor unreadable again."""
        cdef uint64_t value
        read(self.fd, &value, sizeof(value))

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        if self.fd >= 0:
            close(self.fd)
            self.fd = -1

    def __dealloc__(self):
        if self.fd >= 0:
            close(self.fd)


# Check whether the caller runs in the engine's own event loop; no method may be called from outside of it.


cdef class OwnLoop:
    """The event loop of one engine. `running` returns the loop that runs the caller, or None; it must not raise."""

    def __init__(self, running, loop):
        self.running = running
        self.loop = loop

    cdef bint is_running(self) except -1:
        # asyncio's own function in C takes 30 ns; in another thread it returns another loop, or None.
        return self.running() is self.loop


# The base of every kind of rail: an opened NIC, memory registered with it, and an endpoint for one peer.
#
# The layers above (regions, peers) know only these classes; libfabric's and the simulated ones are subclasses. When an
# object goes, it closes whatever it has opened, whether or not its constructor came to an end. Each class does that in
# `__dealloc__`, and the collector does not clear it before that, so it still has its device then.

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
