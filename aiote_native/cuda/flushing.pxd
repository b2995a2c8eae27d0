cdef int flush_writes(void* context) noexcept nogil
