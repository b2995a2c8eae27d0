"""Open and close the descriptors of an engine: an epoll set for its progress, and the one that the event loop watches.

The set contains the rails' wait descriptors, a timer, an eventfd that any thread may write (`wake_fd`) and the socket
of peer wake-ups. The eventfd of notifications (`notify_fd`) tells the event loop that a thread has news for it.
"""

from libc.errno cimport errno
from libc.stdint cimport uint32_t
from libc.string cimport memset
from posix.time cimport CLOCK_MONOTONIC
from posix.unistd cimport close

from aiote_native.status cimport check

cdef extern from "<sys/epoll.h>" nogil:
    struct epoll_event:
        uint32_t events
    int epoll_create1(int)
    int epoll_wait(int, epoll_event*, int, int)
    int epoll_ctl(int, int, int, epoll_event*)
    const int EPOLL_CLOEXEC, EPOLL_CTL_ADD, EPOLL_CTL_DEL
    const uint32_t EPOLLIN

cdef extern from "<sys/timerfd.h>" nogil:
    int timerfd_create(int, int)
    const int TFD_CLOEXEC, TFD_NONBLOCK

cdef extern from "<sys/eventfd.h>" nogil:
    int eventfd(unsigned int, int)
    const int EFD_CLOEXEC, EFD_NONBLOCK


cdef void forget_descriptors(Progress* self) noexcept nogil:
    """Record that there is no descriptor."""
    self.epoll_fd = self.wake_fd = self.timer_fd = self.notify_fd = self.loop_fd = -1


cdef int open_descriptors(Progress* self, bint idle_thread) except -1:
    """Open them all; `close_descriptors` closes those that are open where this raises. `idle_thread`: threads.pyx."""
    self.epoll_fd = open_set()
    check(self.epoll_fd, "epoll_create1")
    self.timer_fd = open_timer() if self.clock == NULL else open_eventfd()
    check(self.timer_fd, "timerfd_create")
    self.notify_fd = open_eventfd()
    check(self.notify_fd, "eventfd")
    self.wake_fd = open_eventfd()
    check(self.wake_fd, "eventfd")
    if self.wakeup_page != NULL:
        watch_descriptor(self.epoll_fd, self.wakeup_fd)
    watch_descriptor(self.epoll_fd, self.wake_fd)
    watch_descriptor(self.epoll_fd, self.timer_fd)
    if idle_thread:
        self.loop_fd = open_set()
        check(self.loop_fd, "epoll_create1")
        watch_descriptor(self.loop_fd, self.epoll_fd)
        watch_descriptor(self.loop_fd, self.notify_fd)
    elif not self.threaded:  # a thread that makes a round (direct.pyx) tells the loop through it
        watch_descriptor(self.epoll_fd, self.notify_fd)
    return 0


cdef void close_descriptors(Progress* self) noexcept:
    """Close those that are open."""
    for fd in (self.epoll_fd, self.timer_fd, self.notify_fd, self.wake_fd, self.loop_fd):
        if fd >= 0:
            close(fd)


cdef int descriptor_of_loop(const Progress* self) noexcept nogil:
    """Return the descriptor that the event loop watches for reading."""
    if self.loop_fd >= 0:
        return self.loop_fd
    return self.notify_fd if self.threaded else self.epoll_fd


cdef int open_set() noexcept nogil:
    cdef int fd = epoll_create1(EPOLL_CLOEXEC)
    return fd if fd >= 0 else -errno


cdef int open_timer() noexcept nogil:
    cdef int fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)
    return fd if fd >= 0 else -errno


cdef int open_eventfd() noexcept nogil:
    cdef int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)
    return fd if fd >= 0 else -errno


cdef int add_descriptor(int epoll_fd, int fd) noexcept nogil:
    """Add a descriptor to a set; return 0 or a negative error number."""
    cdef epoll_event event
    memset(&event, 0, sizeof(event))
    event.events = EPOLLIN
    return -errno if epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event) else 0


cdef int watch_descriptor(int epoll_fd, int fd) except -1:
    """Add a descriptor to a set. `unwatch_descriptor` takes it out, before it is closed."""
    return check(add_descriptor(epoll_fd, fd), "epoll_ctl")


cdef void unwatch_descriptor(int epoll_fd, int fd) noexcept nogil:
    """Take a descriptor out of a set. Closing it does not do that after a fork: the child has it, too."""
    epoll_ctl(epoll_fd, EPOLL_CTL_DEL, fd, NULL)


cdef void sleep_on(int epoll_fd) noexcept nogil:
    """Sleep until a descriptor of the set is readable. It stays readable; a round reads it."""
    cdef epoll_event event
    epoll_wait(epoll_fd, &event, 1, -1)
