ctypedef const char* (*strerror_function)(int) noexcept nogil

cdef void name_errors_with(strerror_function function)

cdef int check(long code, str operation) except -1
cdef str describe(int errnum)
