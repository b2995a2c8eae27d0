cdef class NativeWaiter:
    cdef object loop
    cdef object cancelled_error
    cdef object callback
    cdef object context
    cdef list others
    cdef object message
    cdef bint is_done
    cdef bint is_cancelled
    cdef public bint _asyncio_future_blocking
    cdef int now(self) except -1
    cdef int resolve(self) except -1
    cdef int resolve_others(self) except -1

cdef class Pause:
    cdef NativeWaiter waiter
    cdef bint yielded

cpdef int wake(object waiter) except -1
cpdef int run(object waiter) except -1
cdef object wake_all(list waiters, bint direct, listener)
