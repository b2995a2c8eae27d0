"""Timers: the system's, or those of another clock.

Where time is virtual, an engine must neither spin nor set a timer of the system's.
"""

from libc.errno cimport errno
from libc.stdint cimport uint64_t
from libc.string cimport memset
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec
from posix.unistd cimport close, read

from aiote_native.status cimport check

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
