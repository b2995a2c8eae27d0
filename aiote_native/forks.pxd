from libc.stdint cimport uint64_t

cdef uint64_t fork_epoch() noexcept nogil
cdef int check_process(uint64_t epoch) except -1
