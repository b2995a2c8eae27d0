cdef class OwnLoop:
    cdef object running
    cdef object loop
    cdef bint is_running(self) except -1
