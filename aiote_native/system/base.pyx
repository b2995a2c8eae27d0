"""Checked return codes, forks, timers, and a check of the event loop."""

from libc.errno cimport errno
from libc.stdint cimport uint64_t
from libc.string cimport memset, strerror
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec
from posix.unistd cimport close, read

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
