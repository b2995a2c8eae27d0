from libc.stdint cimport uint64_t

ctypedef const char* (*strerror_function)(int) noexcept nogil

cdef void name_errors_with(strerror_function function)

cdef int check(long code, str operation) except -1
cdef str describe(int errnum)

cdef uint64_t fork_epoch() noexcept nogil
cdef int check_process(uint64_t epoch) except -1

# A clock that replaces the system's. alarm: write to an eventfd once, when that many nanoseconds have passed; a second
# alarm for the same descriptor replaces the first. forget: never write to that descriptor again.
cdef struct ClockOps:
    void (*alarm)(void* context, int fd, uint64_t ns) noexcept nogil
    void (*forget)(void* context, int fd) noexcept nogil

cdef uint64_t clock_ns() noexcept nogil
cdef void start_timer(const ClockOps* clock, void* context, int fd, uint64_t ns) noexcept nogil

cdef class Clock:
    cdef const ClockOps* clock_ops
    cdef void* clock_context

cdef class NativeAlarm:
    cdef readonly int fd

cdef class OwnLoop:
    cdef object running
    cdef object loop
    cdef bint is_running(self) except -1
