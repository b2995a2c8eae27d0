from aiote_native.progress cimport Progress

cdef int start_thread(Progress* self) noexcept nogil
cdef void end_threads(Progress* self) noexcept nogil
cdef void hand_over(Progress* self) noexcept nogil
cdef void take_back(Progress* self) noexcept nogil
