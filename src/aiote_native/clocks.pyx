"""A clock of somebody else's: where time is virtual, an engine must neither spin nor set a timer of the system's."""

from libc.stdint cimport uint64_t
from libc.string cimport memset
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

cdef extern from "<sys/timerfd.h>" nogil:
    struct itimerspec:
        timespec it_interval
        timespec it_value
    int timerfd_settime(int, int, const itimerspec*, itimerspec*)


cdef uint64_t clock_ns() noexcept nogil:
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return <uint64_t> now.tv_sec * 1_000_000_000 + <uint64_t> now.tv_nsec


cdef void start_timer(const ClockOps* clock, void* context, int fd, uint64_t ns) noexcept nogil:
    """Make a timer's descriptor readable in less than a second: a clock's, or (NULL) the system's."""
    cdef itimerspec when
    if clock != NULL:
        clock.alarm(context, fd, ns)
        return
    memset(&when, 0, sizeof(when))
    when.it_value.tv_nsec = ns
    timerfd_settime(fd, 0, &when, NULL)


cdef class Clock:
    """What a core is given in place of the system's timers; made by a subclass."""

    def __cinit__(self):
        self.clock_ops = NULL
        self.clock_context = NULL
