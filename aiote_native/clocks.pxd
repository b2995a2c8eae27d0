from libc.stdint cimport uint64_t

# Who tells the time where it is not the system's. alarm: write to an eventfd when so many nanoseconds have passed,
# once; a second one for the same descriptor takes the place of the first. forget: write to that descriptor no more.
cdef struct ClockOps:
    void (*alarm)(void* context, int fd, uint64_t ns) noexcept nogil
    void (*forget)(void* context, int fd) noexcept nogil

cdef uint64_t clock_ns() noexcept nogil
cdef void start_timer(const ClockOps* clock, void* context, int fd, uint64_t ns) noexcept nogil

cdef class Clock:
    cdef const ClockOps* clock_ops
    cdef void* clock_context

cdef class Alarm:
    cdef readonly int fd
